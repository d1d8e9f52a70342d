"""Rows in an arena as the process that writes sees them, and prompts as the scheduler does."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from eagle3_data.patches.sglang.copier import CopiedRows, Copier
from eagle3_data.patches.sglang.messages import Rows
from eagle3_data.patches.sglang.rows import Prompt, Segment
from eagle3_data.patches.sglang.writing import ArenaRows


def view(copier: Copier, rows: CopiedRows, on_release: Callable[[int], Any] | None = None) -> ArenaRows:
    """Once the copies are done; releasing it lets go of the block."""
    memory = memoryview(copier.arena.memory.numpy())
    return ArenaRows(memory, Rows(0, 0, rows.block.number, rows.spans), on_release or (lambda _: rows.block.let_go()))


def copy(copier: Copier, *arguments: Any) -> list[ArenaRows | None]:
    """`Copier.copy`, done and seen."""
    copied, done = copier.copy(*arguments)
    if done is not None:
        done.synchronize()
    return [rows and view(copier, rows) for rows in copied]


def prompt(name: str, tokens: int, *, finished: bool = False) -> Prompt:
    return Prompt(f"e3d-r-{name}-0", array("i", range(5, 5 + tokens)), SimpleNamespace(finished=lambda: finished))


def segment(name: str, offset: int, rows: int, index: int) -> Segment:
    """A whole prompt in one batch."""
    return Segment(prompt(name, rows), offset, 0, rows, index, True)
