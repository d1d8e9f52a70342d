"""`failures.jsonl`: one row per sample that is not in the data, with the reason and how to try again.

A row that cannot be read is never passed over: who writes the file anew from the others would lose a sample for good.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Protocol

from eagle3_data.errors import Eagle3Error, LedgerError
from eagle3_data.manifest import FAILURES, Manifest
from eagle3_data.protocol import parse_strict

RETRY = "eagle3-data retry DIR"
KINDS = {"str": str, "int": int}


class Planned(Protocol):
    """What is said of a sample."""

    @property
    def key(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def tokens(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A sample that was given up."""

    key: str
    id: str
    tokens: int
    reason: str
    """`Eagle3Error.reason` of the last attempt."""
    detail: str
    attempts: int
    retry: str = RETRY

    @classmethod
    def of(cls, sample: Planned, error: Eagle3Error, attempts: int, *, retry: str = RETRY) -> Failure:
        return cls(
            key=sample.key,
            id=sample.id,
            tokens=sample.tokens,
            reason=error.reason,
            detail=error.message[:500],
            attempts=attempts,
            retry=retry,
        )

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: bytes) -> Failure:
        """Raises ValueError, TypeError or Eagle3Error for anything but a whole row."""
        loaded = json.loads(line.decode())
        if not isinstance(loaded, dict):
            raise TypeError("a row is an object")
        row = cls(**parse_strict(cls, loaded, FAILURES))
        for field in fields(cls):
            if type(getattr(row, field.name)) is not KINDS[str(field.type)]:
                raise TypeError(f"{field.name} is to be {field.type}")
        return row


def parse_failures(data: bytes, where: str) -> list[Failure]:
    """All rows; a torn last line (no newline behind it) is dropped. Raises LedgerError for any other bad line."""
    found = []
    *lines, last = data.split(b"\n")
    for number, line in enumerate((*lines, last) if last else lines, 1):
        try:
            found.append(Failure.from_line(line))
        except (ValueError, TypeError, Eagle3Error) as error:
            if number > len(lines):
                break
            raise LedgerError(
                f"{where}: line {number} is no row of a failed sample: {error}",
                next=f"mend that line, or take {FAILURES} from the mirror or a copy; nothing was changed",
            ) from error
    return found


def by_reason(rows: Iterable[Failure]) -> dict[str, int]:
    return dict(Counter(row.reason for row in rows))


def disagreement(rows: Iterable[Failure], manifest: Manifest) -> str:
    """What a complete build's manifest says otherwise of its failed samples; empty when nothing."""
    found = by_reason(rows)
    if manifest.state != "complete" or found == manifest.failed:
        return ""
    return f"{FAILURES} has {found or 'no rows'}, the manifest says {manifest.failed or 'no sample failed'}"


def read_failures(folder: Path) -> dict[str, Failure]:
    """Rows of `folder` by key, as `parse_failures` finds them; none where the file is missing."""
    try:
        data = (folder / FAILURES).read_bytes()
    except FileNotFoundError:
        return {}
    return {row.key: row for row in parse_failures(data, str(folder / FAILURES))}
