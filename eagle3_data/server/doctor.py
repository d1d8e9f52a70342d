"""Is this server fit for extraction? A list of named checks, ending with prompts that are really captured.

Run before a build and by `eagle3-data serve`: a server that silently does not capture, or captures something else,
costs a whole run.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import random
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import ConnectionLost, DumpFailed, DumpMissing, Eagle3Error, ServerError, ServerUnfit
from eagle3_data.protocol import (
    AUX,
    DUMP_SUFFIX,
    ERROR_SUFFIX,
    IDS,
    LAST,
    PROTOCOL_VERSION,
    CaptureInfo,
    DumpError,
    DumpMeta,
    ProtocolError,
    ids_digest,
    instance_marker,
)
from eagle3_data.server.client import ServerClient

SHORT_TOKENS = 48
PAST_CHUNK_TOKENS = 17
"""How far the long canary reaches into its second chunk."""
LONGEST_CANARY_TOKENS = 33_000
DUMP_TIMEOUT_S = 60.0
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Check:
    """One question about the server."""

    name: str
    ok: bool
    detail: str
    """What was found."""
    next: str = ""
    """What to do about it."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks in order; the list ends where going on would make no sense."""

    url: str
    checks: tuple[Check, ...]
    infos: tuple[CaptureInfo, ...] = ()
    """One per data-parallel rank; empty for a server that is not patched."""

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def raise_if_unfit(self) -> None:
        """Raise ServerUnfit naming every failed check and what to do."""
        failed = [check for check in self.checks if not check.ok]
        if failed:
            what = "; ".join(f"{check.name}: {check.detail}" for check in failed)
            raise ServerUnfit(f"{self.url} is not fit for capture: {what}", next=failed[0].next)


async def diagnose(
    url: str,
    expected: CaptureSpec | None = None,
    *,
    api_key: str | None = None,
    canary: bool = True,
    dump_timeout_s: float = DUMP_TIMEOUT_S,
) -> Diagnosis:
    """Ask a server everything that extraction relies on. Never raises for what is wrong with the server.

    `expected`: also check that it captures exactly this. `canary`: have two prompts captured, one longer than a chunk
    where the context allows, compare their dumps and remove them.
    """
    checks: list[Check] = []
    async with ServerClient(url, api_key=api_key) as client:
        infos = await _ask(client, checks)
        if infos:
            _configuration(infos, expected, checks)
            if canary and all(check.ok for check in checks):
                await _canaries(client, infos, dump_timeout_s, checks)
    return Diagnosis(client.url, tuple(checks), tuple(infos))


async def _ask(client: ServerClient, checks: list[Check]) -> list[CaptureInfo]:
    try:
        await client.check_health()
    except ConnectionLost as error:
        checks.append(Check("reachable", False, error.message, error.next))
        return []
    except ServerError as error:
        checks.append(Check("reachable", True, client.url))
        checks.append(Check("healthy", False, error.message, error.next or "wait until it has loaded, or read its log"))
        return []
    checks += [Check("reachable", True, client.url), Check("healthy", True, "answers /health")]
    try:
        infos = await client.capture_infos()
    except Eagle3Error as error:
        checks.append(Check("patched", False, error.message, error.next))
        return []
    first = infos[0]
    checks.append(Check("patched", True, f"eagle3-data {first.plugin_version}, SGLang {first.sglang_version}"))
    checks.append(Check("protocol", True, f"version {PROTOCOL_VERSION}"))
    return infos


def _configuration(infos: Sequence[CaptureInfo], expected: CaptureSpec | None, checks: list[Check]) -> None:
    first = infos[0]
    forms = {(info.model_path, info.layers, info.width, info.dtype) for info in infos}
    if len(forms) > 1:
        checks.append(Check("ranks", False, "data-parallel ranks capture different things", "restart the server"))
    radix = [info for info in infos if info.radix_cache]
    checks.append(Check("radix cache", not radix, "on" if radix else "off", "--disable-radix-cache" if radix else ""))
    low = [info for info in infos if info.free_bytes < info.high_water_bytes]
    detail = f"{first.free_bytes:,} bytes free, high-water mark {first.high_water_bytes:,}"
    checks.append(Check("spool space", not low, detail, "free space in the spool" if low else ""))
    if expected is None:
        return
    name_ok = same_model(first.model_path, expected.model)
    checks.append(
        Check("model", name_ok, first.model_path, "" if name_ok else f"start the server with {expected.model}")
    )
    for field in ("layers", "width", "dtype", "norm", "convention", "vocab_size"):
        found, wanted = getattr(first, field), getattr(expected, field)
        if field == "vocab_size" and not wanted:
            continue
        ok = found == wanted
        detail = f"{found}" if ok else f"{found}, expected {wanted}"
        hint = "start the server with --layers " + ",".join(map(str, expected.layers)) if field == "layers" else ""
        checks.append(Check(field, ok, detail, "" if ok else hint or f"start the server with {expected.model}"))


def same_model(found: str, wanted: str) -> bool:
    """The same hub id, the same folder, or a folder on another machine with the same name."""
    if found == wanted or Path(found).name == Path(wanted).name:
        return True
    return Path(found).exists() and Path(wanted).exists() and os.path.samefile(found, wanted)


# ------------------------------------------------------------- canaries


def canary_lengths(info: CaptureInfo) -> list[int]:
    """Tokens of the canary prompts: a short one, and one that needs two chunks if the server chunks."""
    limit = min(info.context_length, LONGEST_CANARY_TOKENS)
    lengths = [min(SHORT_TOKENS, limit)]
    if info.chunk_tokens > 0 and info.chunk_tokens + PAST_CHUNK_TOKENS <= limit:
        lengths.append(info.chunk_tokens + PAST_CHUNK_TOKENS)
    else:
        lengths.append(min(2 * SHORT_TOKENS + 1, limit))
    return lengths


async def _canaries(client: ServerClient, infos: Sequence[CaptureInfo], timeout_s: float, checks: list[Check]) -> None:
    info, run = infos[0], secrets.token_hex(8)
    spool = Path(info.spool)
    seen_here = instance_marker(spool, info.instance).exists()
    with tempfile.TemporaryDirectory(prefix="eagle3-doctor-") as scratch:
        for number, tokens in enumerate(canary_lengths(info)):
            rid = f"e3d-{run}-canary{number}-0"
            ids = [random.Random(tokens).randrange(info.vocab_size // 2) for _ in range(tokens)]
            try:
                reply = await client.prefill(ids, rid)
                if reply.prompt_tokens != tokens:
                    raise ServerUnfit(f"the server took {reply.prompt_tokens} of {tokens} tokens")
                if seen_here:
                    path = await _local_dump(spool, rid, timeout_s)
                else:
                    path = Path(scratch) / f"{rid}{DUMP_SUFFIX}"
                    await client.fetch_dump(rid, path, wait_s=timeout_s)
                problems = inspect_dump(path, rid, ids, info)
                next_token = reply.output_ids[0] if reply.output_ids else None
                if not problems and next_token != _meta(path).next_token:
                    problems = [f"next token {_meta(path).next_token}, the server generated {next_token}"]
                if seen_here:
                    path.unlink()
                else:
                    await client.delete_dump(rid)
            except Eagle3Error as error:
                checks.append(Check(f"canary of {tokens} tokens", False, error.message, error.next or "read its log"))
                return
            except OSError as error:
                hint = "run as a user who may read and delete in the spool (its group may)"
                checks.append(Check("spool", False, f"{error.filename}: {error.strerror}", hint))
                return
            checks.append(
                Check(
                    f"canary of {tokens} tokens",
                    not problems,
                    "; ".join(problems) or "captured, whole, finite, checksum right",
                    "report this with the server's log: its dumps must not be used" if problems else "",
                )
            )
    where = "seen from here" if seen_here else "not seen from here; dumps travel over HTTP"
    checks.append(Check("spool", True, f"{info.spool} ({where})"))


async def _local_dump(spool: Path, rid: str, timeout_s: float) -> Path:
    """The dump in a spool that both sides see. Raises DumpFailed for an error record, DumpMissing when none comes."""
    path, error = spool / f"{rid}{DUMP_SUFFIX}", spool / f"{rid}{ERROR_SUFFIX}"
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not path.exists():
        if error.exists():
            record = DumpError.from_json(error.read_text())
            raise DumpFailed(f"{record.reason}: {record.detail}")
        if asyncio.get_running_loop().time() > deadline:
            raise DumpMissing(f"no dump of {rid} in {spool} within {timeout_s:.0f} s")
        await asyncio.sleep(POLL_S)
    return path


def _meta(path: Path) -> DumpMeta:
    from eagle3_data.shards.reader import read_metadata

    with path.open("rb") as file:
        return DumpMeta.from_strings(read_metadata(file.read(1 << 16)))


def inspect_dump(path: Path, rid: str, ids: Sequence[int], info: CaptureInfo) -> list[str]:
    """What is wrong with a dump of this prompt; empty when nothing is. Reads every byte."""
    import xxhash

    from eagle3_data.errors import ShardCorrupt
    from eagle3_data.shards.reader import parse_header

    with path.open("rb") as file, contextlib.closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as data:
        try:
            tensors, meta = parse_header(data[: 1 << 16], len(data)), _meta(path)
        except (ShardCorrupt, ProtocolError) as error:
            return [str(error)]
        wanted = {
            "rid": rid,
            "tokens": len(ids),
            "ids_digest": ids_digest(ids),
            "layers": info.layers,
            "width": info.width,
            "dtype": info.dtype,
            "norm": info.norm,
            "finite": True,
        }
        problems = [
            f"{field} is {getattr(meta, field)}, expected {value}"
            for field, value in wanted.items()
            if getattr(meta, field) != value
        ]
        shapes = {AUX: [len(ids), len(info.layers) * info.width], LAST: [len(ids), info.width], IDS: [len(ids)]}
        for name, shape in shapes.items():
            if name not in tensors or tensors[name][1] != shape:
                return [*problems, f"{name} is {tensors.get(name, 'missing')}, expected shape {shape}"]
        sums = [xxhash.xxh3_128(data[tensors[name][2] : tensors[name][3]]).hexdigest() for name in (AUX, LAST)]
        if ":".join(sums) != meta.checksum:
            problems.append("its bytes do not give its checksum")
    return problems
