"""What `status` reads does not grow with the journal; nor does what a scrape or a log line needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_data import journal
from eagle3_data.journal import TAIL_BYTES, Journal, journal_path, read_tail
from eagle3_data.status import read_status
from tests.test_metrics import tick


def test_only_the_tail_of_a_long_journal_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Journal(tmp_path).close()
    line = tick(7, 100.0).to_line()
    with journal_path(tmp_path).open("w") as file:
        file.write(line * (40 * TAIL_BYTES // len(line)))
        file.write(tick(99, 200.0).to_line())
    asked: list[int] = []
    real = open

    def counting(path: Path, mode: str = "r") -> object:
        file = real(path, mode)
        if path == journal_path(tmp_path):
            wrapped = file.read

            class Counted:
                def __enter__(self) -> Counted:
                    return self

                def __exit__(self, *error: object) -> None:
                    file.close()

                def seek(self, *place: int) -> int:
                    return file.seek(*place)

                def read(self) -> bytes:
                    data: bytes = wrapped()
                    asked.append(len(data))
                    return data

            return Counted()
        return file

    monkeypatch.setattr(journal, "open", counting, raising=False)
    assert len(read_tail(journal_path(tmp_path))) > 1
    assert read_status(tmp_path, now=201.0).done == 99
    assert asked == [TAIL_BYTES, TAIL_BYTES]


def test_the_command_loads_nothing_heavy(tmp_path: Path) -> None:
    """Imports are most of what `status` takes: typer and its pydantic doubled it."""
    Journal(tmp_path).close()
    journal_path(tmp_path).write_text(tick(7, 100.0).to_line())
    code = (
        "import sys; from eagle3_data.cli import main\n"
        "sys.argv = ['eagle3-data', 'status', sys.argv[1]]\n"
        "try: main()\n"
        "finally: print(sorted({'typer', 'pydantic', 'torch', 'numpy', 'pyarrow', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert "7 of" in done.stdout, done.stderr
    assert done.stdout.strip().endswith("[]")
