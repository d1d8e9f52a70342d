"""Rules of the repository, held by tests instead of prose."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"eagle3_data": "eagle3_data", "builders": "eagle3_data.builders", "patches": "eagle3_data.patches"}
PACKAGES = {**FOLDERS, "train": "eagle3_data.train"}


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    """Names that a module imports; `top_level`: when it is imported itself, without TYPE_CHECKING blocks."""
    tree, found = ast.parse(path.read_text()), set()
    nodes = tree.body if top_level else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_core_import_is_light() -> None:
    """It runs inside the SGLang process."""
    assert not {"torch", "datasets", "pydantic", "aiohttp"} & modules_after("import eagle3_data")


def test_status_does_not_wait_for_torch() -> None:
    heavy = modules_after("from eagle3_data.cli import make_app; make_app('status')")
    assert not {"torch", "datasets", "transformers"} & heavy


@pytest.mark.parametrize("folder", PACKAGES)
def test_builders_and_train_never_import_each_other(folder: str) -> None:
    forbidden = {"builders": "eagle3_data.train", "train": "eagle3_data.builders"}.get(folder)
    for path in modules(folder):
        names = imports(path)
        if forbidden:
            assert not [name for name in names if name.startswith(forbidden)], path


def test_patches_import_the_protocol_alone() -> None:
    for path in modules("patches"):
        ours = {name for name in imports(path) if name.startswith("eagle3_data")}
        assert all(
            name == "eagle3_data" or name.startswith(("eagle3_data.protocol", "eagle3_data.patches")) for name in ours
        ), (
            path,
            ours,
        )


def test_protocol_is_standard_library() -> None:
    names = {name.split(".")[0] for name in imports(ROOT / "eagle3_data/protocol.py")}
    assert names <= sys.stdlib_module_names


def test_nothing_reads_or_writes_pickles() -> None:
    """Invariant 9. Only other projects' files are torch's: read with weights_only=True, written in one module."""
    for folder in PACKAGES:
        for path in modules(folder):
            assert not {"pickle", "dill", "cloudpickle", "joblib"} & imports(path), path
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                    "torch.load",
                    "numpy.load",
                    "np.load",
                ):
                    assert "weights_only=True" in ast.unparse(node), f"{path}:{node.lineno}"
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.save":
                    assert path.name == "foreign_states.py", f"{path}:{node.lineno}"


def test_every_package_is_in_the_wheel() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for folder, package in PACKAGES.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            if "stubs" in parts:
                continue
            assert f'"{".".join([package, *parts])}"' in text, init


def test_no_module_grows_without_end() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for f in PACKAGES
        for p in modules(f)
        if (n := len(p.read_text().splitlines())) > 400
    }
    assert long == {}


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=lambda path: path.name)
def test_every_test_can_fail(path: Path) -> None:
    """A test asserts something, expects an error, or calls a helper whose name says that it checks."""
    words = ("assert", "raises", "check", "expect", "settled")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            assert any(word in ast.unparse(node) for word in words), f"{path}:{node.lineno} {node.name}"
