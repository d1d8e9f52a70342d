"""The wrap of `datasets`: whichever is imported first, after a reload, through pickles, and nothing else is touched."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHECK = "import datasets.load as L; assert L.dataset_module_factory.__module__ == 'eagle3_data.registration', L"
CASES = {
    "ours first": f"import eagle3_data; assert 'datasets' not in __import__('sys').modules; import datasets; {CHECK}",
    "theirs first": f"from datasets import load_dataset; import eagle3_data; {CHECK}",
    "reloaded": f"import eagle3_data, datasets, importlib; importlib.reload(datasets.load); {CHECK}",
    "imported twice": f"import eagle3_data, datasets, importlib; importlib.reload(eagle3_data); {CHECK}",
    "pickles": (
        "import eagle3_data, datasets.load as L, pickle; "
        "assert pickle.loads(pickle.dumps(L.dataset_module_factory)) is L.dataset_module_factory"
    ),
    "inspect is wrapped, too": (
        "import datasets, eagle3_data; "
        "assert datasets.get_dataset_config_names('eagle3_data/kimi_k25_synth') == ['default']"
    ),
    "others are untouched": (
        "import eagle3_data, datasets, json; open('x.jsonl', 'w').write(json.dumps({'a': 1})); "
        "assert datasets.load_dataset('json', data_files='x.jsonl', split='train')[0] == {'a': 1}"
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_in_a_fresh_process(case: str, tmp_path: object) -> None:
    done = subprocess.run([sys.executable, "-c", CASES[case]], capture_output=True, text=True, cwd=str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]


def test_missing_hook_target_names_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """C56: on a `datasets` without the function, the supported range is named."""
    import types

    from eagle3_data import registration

    with pytest.raises(ImportError, match=r">=4\.8,<6"):
        registration._wrap(types.ModuleType("datasets.load"))


@pytest.mark.parametrize(
    ("found", "fits"), [("4.7.0", False), ("3.6.0", False), ("6.0.0", False), ("4.8.5", True), ("5.2.0", True)]
)
def test_unsupported_version_names_the_range(monkeypatch: pytest.MonkeyPatch, found: str, fits: bool) -> None:
    """C56: no loading script, no trust_remote_code; on another version our names say which ones work."""
    from eagle3_data import registration
    from eagle3_data.errors import ConfigError

    monkeypatch.setattr("importlib.metadata.version", lambda name: found)
    if fits:
        assert registration.dataset_module_factory("eagle3_data/custom").module_path
        return
    with pytest.raises(ConfigError, match=rf"datasets {found} is not supported.*>=4\.8,<6"):
        registration.dataset_module_factory("eagle3_data/custom")
