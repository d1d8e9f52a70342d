"""The tests of `load_dataset` and of mirrors with another pair of datasets and huggingface_hub than the installed one.

    python tests/loading/check_datasets_pairs.py 4.8.5 1.33.0 [VENV]

Makes a virtual environment that borrows this one's packages, puts the pair on top (`--no-deps`), runs the tests in it,
and adds a line to tests/loading/datasets_pairs.txt.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TESTS = ("tests/loading", "tests/shards/test_remote.py")


def main(datasets: str, hub: str, folder: str | None) -> int:
    home = Path(folder or tempfile.mkdtemp(prefix="eagle3-pair-"))
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=False)
        site = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        borrowed = [path for path in sys.path if path.endswith("site-packages")]
        (site / "base.pth").write_text("\n".join(dict.fromkeys([*borrowed, sysconfig.get_path("purelib")])) + "\n")
        packages = [f"datasets=={datasets}", f"huggingface_hub=={hub}"]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), *packages], check=True
        )
        subprocess.run(
            [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", str(ROOT)],
            check=True,
        )
    code = "import datasets, huggingface_hub as hub, sys; print(datasets.__version__, hub.__version__)"
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.split()
    if found != [datasets, hub]:
        print(f"the environment has {found}, not {[datasets, hub]}")
        return 1
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = done.stdout.strip().splitlines()[-1].strip("= ").rpartition(" in ")[0]
    print(done.stdout[-3000:])
    with (HERE / "datasets_pairs.txt").open("a") as file:
        file.write(f"datasets {datasets}, huggingface_hub {hub}, Python {sys.version.split()[0]}: {last}\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None))
