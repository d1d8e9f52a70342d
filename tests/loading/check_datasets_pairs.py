"""The tests of `load_dataset` and of mirrors with another pair of datasets and huggingface_hub than the installed one.

    python tests/loading/check_datasets_pairs.py 4.8.5 1.33.0 [VENV]

Makes a virtual environment that borrows this one's packages, has pip put the pair on top with what it needs (so a pair
that excludes each other is refused here), runs the tests in it, and notes the result in datasets_pairs.txt.
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
TESTS = ("tests/loading", "tests/hub", "tests/shards/test_remote.py", "tests/builders/test_mirroring.py")
RESULTS = HERE / "datasets_pairs.txt"


def make_environment(home: Path, datasets: str, hub: str) -> bool:
    """False when pip finds no way to have both."""
    venv.create(home, with_pip=False)
    site = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (site / "base.pth").write_text("\n".join(dict.fromkeys([*borrowed, sysconfig.get_path("purelib")])) + "\n")
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q"]
    pair = [f"datasets=={datasets}", f"huggingface_hub=={hub}", "fsspec", "s3fs"]
    if subprocess.run([*pip, *pair]).returncode:
        return False
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], check=True)
    return True


def main(datasets: str, hub: str, folder: str | None) -> int:
    home = Path(folder or tempfile.mkdtemp(prefix="eagle3-pair-"))
    python = home / "bin" / "python"
    pair = f"datasets {datasets}, huggingface_hub {hub}"
    if not python.exists() and not make_environment(home, datasets, hub):
        note(pair, "pip refuses the pair: one does not take the other")
        return 1
    code = "import datasets, huggingface_hub as hub, sys; print(datasets.__version__, hub.__version__)"
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.split()
    if found != [datasets, hub]:
        print(f"the environment has {found}, not {[datasets, hub]}")
        return 1
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-3000:])
    last = done.stdout.strip().splitlines()[-1].strip("= ").rpartition(" in ")[0]
    note(pair, f"Python {sys.version.split()[0]}: {last}")
    return done.returncode


def note(pair: str, result: str) -> None:
    """One line per pair; a new result takes the place of the old one."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    kept = [line for line in lines if not line.startswith(f"{pair}, ") and not line.startswith(f"{pair}: ")]
    RESULTS.write_text("\n".join(sorted([*kept, f"{pair}, {result}"])) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None))
