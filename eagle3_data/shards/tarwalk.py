"""Walking a shard as an archive, member by member, without trusting it: used by `verify` and for foreign shards."""

from __future__ import annotations

import mmap
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from eagle3_data.errors import ShardCorrupt
from eagle3_data.shards.layout import TAR_BLOCK, SampleRecord

MEMBER_NAME = re.compile(r"(?P<key>[A-Za-z0-9_]{1,80})\.(?P<kind>json|safetensors)")


@dataclass(frozen=True, slots=True)
class Member:
    key: str
    kind: str
    offset: int
    """Of the data, bytes."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class TarSample:
    """One sample as it stands in the archive: its record and where its safetensors member lies."""

    record: SampleRecord
    offset: int
    nbytes: int


def members(view: mmap.mmap) -> Iterator[Member]:
    """Plain files with our names only. Raises ShardCorrupt for anything else (links, devices, paths, a short end)."""
    at, size = 0, len(view)
    while True:
        header = view[at : at + TAR_BLOCK]
        if len(header) < TAR_BLOCK:
            raise ShardCorrupt(f"archive ends at byte {size} without its end mark")
        if header == bytes(TAR_BLOCK):
            break
        try:
            info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
        except (tarfile.HeaderError, UnicodeDecodeError, ValueError) as error:
            raise ShardCorrupt(f"no tar header at byte {at}: {error}") from error
        match = MEMBER_NAME.fullmatch(info.name)
        if info.type != tarfile.REGTYPE or match is None:
            raise ShardCorrupt(f"member {info.name!r} at byte {at} is not a sample's file")
        start = at + TAR_BLOCK
        if info.size < 0 or start + info.size > size:
            raise ShardCorrupt(f"member {info.name!r} claims {info.size} bytes, the archive ends after {size - start}")
        yield Member(match["key"], match["kind"], start, info.size)
        at = start + info.size + -info.size % TAR_BLOCK


def samples(view: mmap.mmap) -> Iterator[TarSample]:
    """Pairs of members. Raises ShardCorrupt when they are not adjacent, in order, and of one key."""
    json_member: Member | None = None
    for member in members(view):
        if member.kind == "json":
            if json_member is not None:
                raise ShardCorrupt(f"sample {json_member.key} has no safetensors member")
            json_member = member
            continue
        if json_member is None or json_member.key != member.key:
            raise ShardCorrupt(f"{member.key}.safetensors does not follow its json")
        try:
            record = SampleRecord.from_json(view[json_member.offset : json_member.offset + json_member.nbytes])
        except ValueError as error:
            raise ShardCorrupt(f"{member.key}.json: {error}") from error
        if record.key != member.key:
            raise ShardCorrupt(f"{member.key}.json names sample {record.key}")
        yield TarSample(record, member.offset, member.nbytes)
        json_member = None
    if json_member is not None:
        raise ShardCorrupt(f"sample {json_member.key} has no safetensors member")
