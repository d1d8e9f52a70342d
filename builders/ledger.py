"""Nothing leaves without a reason: planned == saved + failed + skipped, checked whenever a run ends.

Failures live in `failures.jsonl`, published with the data: one row per sample that is not in it, with the reason and
how to try again. A row is durable before its shard is sealed without the sample.
"""

from __future__ import annotations

from pathlib import Path

from eagle3_data import durable
from eagle3_data.errors import DiskFull, LedgerError
from eagle3_data.failures import Failure, by_reason, read_failures
from eagle3_data.manifest import FAILURES


class Ledger:
    """Counts of one build. `planned` = samples to extract + conversations skipped before.

    Raises LedgerError, with nothing written, when a row of the file cannot be read.
    """

    def __init__(self, folder: Path, planned: int, skipped: dict[str, int]) -> None:
        self.folder, self.planned, self.skipped = folder, planned, dict(skipped)
        self.saved = 0
        """Samples in sealed shards, or placed and checked in open ones."""
        self.failures = read_failures(folder)
        self.rewrite()
        self._file = durable.Lines(folder / FAILURES)
        self._behind = False
        """Rows are missing in the file, since the disk was full."""

    @property
    def failed(self) -> dict[str, int]:
        return by_reason(self.failures.values())

    @property
    def failed_tokens(self) -> int:
        return sum(row.tokens for row in self.failures.values())

    def save(self, samples: int) -> None:
        self.saved += samples

    def fail(self, row: Failure) -> None:
        self.failures[row.key] = row
        try:
            self._file.write(row.to_line())
        except DiskFull:
            self._behind = True  # `flush` brings it, before the shard without this sample is sealed

    def flush(self) -> None:
        """All rows durable. Raises OSError or DiskFull on a full disk; then it may be called again."""
        if self._behind:
            self.rewrite()
            self._file.close()
            self._file = durable.Lines(self.folder / FAILURES)
            self._behind = False
        self._file.sync()

    def forgive(self) -> None:
        """Clear the failures so that they are tried again."""
        self.failures = {}
        self._file.close()
        self.rewrite()
        self._file = durable.Lines(self.folder / FAILURES)

    def rewrite(self) -> None:
        durable.write_text(self.folder / FAILURES, "".join(row.to_line() for row in self.failures.values()))

    def check(self, *, complete: bool) -> None:
        """Raises LedgerError when samples are counted twice, or (for a complete build) not at all."""
        total = self.saved + len(self.failures) + sum(self.skipped.values())
        if total > self.planned or (complete and total != self.planned):
            raise LedgerError(
                f"saved({self.saved}) + failed({len(self.failures)}) + skipped({sum(self.skipped.values())}) "
                f"= {total}, planned({self.planned})"
            )

    def close(self) -> None:
        self._file.close()
