"""One family of errors. Each says what went wrong, what was found and expected, and what to do next.

`reason` is the word that ledgers, `failures.jsonl` and `status` count by; `retryable` is what extraction does with it.
"""

from __future__ import annotations

from typing import ClassVar


class Eagle3Error(Exception):
    """Base of all errors a user can meet. `str()` is the whole message, ready to print without a traceback."""

    reason: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, next: str = "") -> None:
        self.message, self.next = message, next
        super().__init__(f"{message}\n  next: {next}" if next else message)


class ConfigError(Eagle3Error):
    """A setting, a file or an argument of the user's is wrong."""

    reason = "config"


class InputError(ConfigError):
    """Conversations or prompts that cannot be read; names file and line."""

    reason = "input"


class SampleError(Eagle3Error):
    """A conversation that cannot become a sample (nothing to learn, too long, unstable template)."""

    reason = "sample"


class ServerError(Eagle3Error):
    """The server is missing, not ours, of the wrong model, or answered with an error."""

    reason = "server"
    retryable = True


class ServerUnfit(ServerError):
    """The server is reachable and must not be used: unpatched, wrong model, radix cache on."""

    reason = "server_unfit"
    retryable = False


class ConnectionLost(ServerError):
    """Refused or reset: the server is gone, the request is not to blame."""

    reason = "connection"


class RequestTimeout(ServerError):
    reason = "timeout"


class RequestRejected(ServerError):
    """HTTP 4xx: the same request would be rejected again."""

    reason = "rejected"
    retryable = False


class DumpMissing(ServerError):
    """The response came and its dump did not, within the deadline."""

    reason = "no_dump"


class DumpFailed(ServerError):
    """The server left an error record instead of a dump."""

    reason = "dump_failed"


class SpoolFull(DumpFailed):
    """The server had no space for the dump: it waits for space, however long that takes, and no attempt is lost."""

    reason = "spool_full"


class DumpMismatch(Eagle3Error):
    """A dump that is not the request's: token count, ids, widths, dtype or layers differ."""

    reason = "mismatch"
    retryable = True


class DumpCorrupt(Eagle3Error):
    """A dump that is truncated or whose bytes do not give its checksum."""

    reason = "corrupt"
    retryable = True


class NonFinite(Eagle3Error):
    """NaN or Inf in the states of a sample."""

    reason = "non_finite"
    retryable = True


class DiskFull(Eagle3Error):
    reason = "disk"
    retryable = True


class ShardCorrupt(Eagle3Error):
    """A shard whose bytes are not what the manifest says; names shard and last good key."""

    reason = "shard_corrupt"


class ManifestMismatch(ConfigError):
    """A resume with settings that would shape the data differently; names the field."""

    reason = "manifest"


class BuildFailed(Eagle3Error):
    """A run that stopped: too many failures, or nothing left to use. What was sealed is kept."""

    reason = "build"


class LedgerError(Eagle3Error):
    """saved + failed + skipped != planned (an error of ours, never of the data's), or a damaged `failures.jsonl`."""

    reason = "ledger"


class DatasetUnavailable(Eagle3Error):
    """`load_dataset` found no build, no mirror and no server."""

    reason = "unavailable"


class MirrorError(Eagle3Error):
    """A mirror that cannot be written, read or trusted. What it has confirmed stays."""

    reason = "mirror"


class TrainingError(Eagle3Error):
    """Training or export cannot go on (non-finite loss, foreign checkpoint, unsupported target)."""

    reason = "training"
