"""The short form of `make chaos`; in a process of its own, since it forks."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_random_kills_leave_every_invariant() -> None:
    command = [sys.executable, "-m", "tests.chaos", "--kills", "16", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 kills" in done.stdout
    assert int(done.stdout.split(" amid work; every")[0].split()[-1]) >= 4, done.stdout
