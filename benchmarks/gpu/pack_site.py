"""Pack SGLang 0.5.17 and what it imports into one archive, for a GPU host without a package registry.

    python benchmarks/gpu/pack_site.py OUT.tar.xz [another requirement ...]      (about 3 minutes, 38 MiB)

The host brings Python 3.12, torch 2.11 (CUDA 13), triton, nvcc, ninja and the usual Python packages. A wheel of
sglang-kernel is compiled against one torch release: 0.5.17 is the newest SGLang whose kernels are built for torch 2.11.
FlashAttention-3, multimodal generation and the kernels of other GPUs are left out to stay small, so serve with
`--attention-backend triton --sampling-backend pytorch`. `setup.sh` unpacks the archive on the host.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

MANYLINUX = ("2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17", "2014", "2_5", "1")
REQUIREMENTS = (
    "sglang==0.5.17",
    "sglang-kernel==0.4.5",
    "transformers==5.12.1",
    "tokenizers==0.22.2",
    "flashinfer_python==0.6.15.post1",
    "apache-tvm-ffi==0.1.11",
    "compressed-tensors==0.17.0",
    "xgrammar==0.2.7",
    "openai==2.6.1",
    "quack-kernels==0.6.5",
    "gguf==0.19.0",
    "annotated-types",
    "blobfile",
    "cffi",
    "cuda-python==13.4.4",
    "dill==0.4.1",
    "distro",
    "easydict",
    "fastapi==0.165.0",
    "starlette==1.10.0",
    "interegular",
    "jiter",
    "jsonschema",
    "jsonschema-specifications",
    "referencing",
    "rpds-py",
    "loguru",
    "msgspec",
    "orjson",
    "opentelemetry-api",
    "partial-json-parser",
    "pybase64",
    "pycparser",
    "pydantic==2.14.4",
    "pydantic-core==2.50.5",
    "python-multipart",
    "pyzmq",
    "setproctitle",
    "sniffio",
    "soundfile",
    "typing-inspection",
    "uvicorn",
    "datasets==5.2.0",
    "multiprocess",
    "xxhash",
)
"""Installed without their dependencies; what is missing here the host has."""
LEFT_OUT = re.compile(
    r"^sglang/(multimodal_gen|test|benchmark)/"
    r"|^sglang/srt/(server|grpc)/_core.*\.so$"
    r"|moe/configs/"
    r"|^sgl_kernel/((flash_ops|infllm_ops|flashmla_ops).*\.so|sm100/)"
    r"|^flashinfer/data/cutlass/(test|examples|python|media|docs)/"
)
STAND_INS = ("IPython", "openai_harmony", "helion", "deep_gemm")
"""Imported by SGLang at module level and never called when it serves text."""
STAND_IN = '''"""Import-only stand-in: any name, and any submodule, is there and does nothing."""
import importlib.machinery
import sys
import types


def _anything(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__init__": lambda self, *args, **named: None})


class _Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        return _anything(name)


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(__name__ + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())


def __getattr__(name):
    return _anything(name)
'''


def download(requirement: str, folder: Path) -> None:
    """One wheel for Python 3.12 on x86-64 Linux, without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--python-version", "3.12", "--implementation", "cp"]
    for abi in ("cp312", "abi3", "cp39", "none"):
        command += ["--abi", abi]
    for release in MANYLINUX:
        command += ["--platform", f"manylinux{'_' if '_' in release else ''}{release}_x86_64"]
    done = subprocess.run([*command, requirement], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{requirement}: {done.stderr.strip().splitlines()[-1]}")


def unpack(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site, [name for name in archive.namelist() if not LEFT_OUT.search(name)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("more", nargs="*", help="further requirements")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eagle3-pack-") as folder:
        wheels, site = Path(folder) / "wheels", Path(folder) / "site"
        site.mkdir()
        for number, requirement in enumerate([*REQUIREMENTS, *options.more], start=1):
            print(f"{number}/{len(REQUIREMENTS) + len(options.more)} {requirement}", flush=True)
            download(requirement, wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            unpack(wheel, site)
        for data in site.glob("*.data"):
            for part in ("purelib", "platlib"):
                if (data / part).is_dir():
                    shutil.copytree(data / part, site, dirs_exist_ok=True)
            shutil.rmtree(data)
        for name in STAND_INS:
            (site / name).mkdir(exist_ok=True)
            (site / name / "__init__.py").write_text(STAND_IN)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(options.out, "w:xz", preset=6) as archive:
            archive.add(site, arcname=".")
    print(f"{options.out}: {options.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
