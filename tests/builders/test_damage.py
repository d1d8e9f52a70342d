"""One flipped bit in the small files of a build: nothing is forgotten, and what is wrong is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3_data.builders.ledger import Ledger
from eagle3_data.errors import LedgerError
from eagle3_data.failures import Failure, parse_failures
from eagle3_data.manifest import FAILURES
from eagle3_data.verify import verify
from tests.builders.conftest import Builds, write_samples
from tests.replay import Faults

ROWS = [
    Failure(key=f"{n:08d}", id=f"row-{n}", tokens=40 + n, reason="rejected", detail="HTTP 400", attempts=1)
    for n in (3, 9, 14)
]


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def test_no_flipped_bit_loses_a_row() -> None:
    data = "".join(row.to_line() for row in ROWS).encode()
    refused = 0
    for at in range(len(data) - 1):  # without the last newline a whole file looks torn
        for bit in range(8):
            try:
                assert len(parse_failures(flipped(data, at, bit), "here")) == len(ROWS), (at, bit)
            except LedgerError:
                refused += 1
    assert refused > len(data)


def test_only_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    lines = [row.to_line().encode() for row in ROWS]
    for end in range(1, len(lines[2])):
        found = parse_failures(b"".join(lines[:2]) + lines[2][:end], "here")
        assert [row.key for row in found] == ["00000003", "00000009", "00000014"][
            : 3 if end + 1 == len(lines[2]) else 2
        ]
    for bad in (b"\n", b"[]\n", b"{}\n", lines[2].replace(b"54", b"5.4"), lines[2].replace(b"HTTP", b"\xc8TTP")):
        assert bad != lines[2]
        path = tmp_path / FAILURES
        path.write_bytes(lines[0] + bad + lines[1])
        with pytest.raises(LedgerError, match=r"failures\.jsonl: line 2 is no row") as found_error:
            Ledger(tmp_path, 10, {})
        assert "mend that line, or take failures.jsonl from the mirror" in found_error.value.next
        assert path.read_bytes() == lines[0] + bad + lines[1], "nothing was written"


def test_a_damaged_ledger_stops_build_and_retry_and_verify_says_so(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 40)
    path, manifest = builds.folder / "out" / FAILURES, builds.folder / "out/manifest.json"

    def problems() -> str:
        return "\n".join(map(str, verify(builds.folder / "out").problems))

    with builds.server(Faults(reply=dict.fromkeys((3, 9, 14, 20), "400"))) as server:
        assert builds.run("out", samples, server.url, max_failure_share=1.0).failed == {"rejected": 4}
        good, before = path.read_bytes(), manifest.read_bytes()
        assert problems() == ""
        lines = good.splitlines(keepends=True)
        rows = [json.loads(line) for line in lines]
        other_reason = good.replace(b'"rejected"', b'"rekected"', 1)
        saved_key = next(f"{n:08d}" for n in range(40) if f"{n:08d}" not in {row["key"] for row in rows})
        damages = [
            (flipped(good, 2, 0), "line 1 is no row", "line 1 is no row"),
            (flipped(good, len(lines[0]) + 3, 7), "line 2 is no row", "line 2 is no row"),
            (flipped(good, len(good) - 1, 0), "saved 36 + failed 3", "'rejected': 3"),
            (b"".join(lines[1:]), "saved 36 + failed 3", "'rejected': 3"),
            (other_reason, "the manifest says {'rejected': 4}", "'rekected': 1"),
            (lines[1] + b"".join(lines[1:]), "saved 36 + failed 3", "'rejected': 3"),
            (good.replace(rows[0]["key"].encode(), saved_key.encode()), f"sample {saved_key} is in", None),
            (good.replace(rows[0]["key"].encode(), b"0p000003"), None, "0p000003 is no sample of this build"),
        ]
        for bad, said, refusal in damages:
            path.write_bytes(bad)
            if said is not None:
                assert said in problems()
            if refusal is None:
                continue
            for change in ({"retry_failed": True},) if said is None else ({}, {"retry_failed": True}):
                with pytest.raises(LedgerError, match=refusal):
                    builds.run("out", samples, server.url, max_failure_share=1.0, **change)
            assert path.read_bytes() == bad, "nothing was written"
            assert said is None or manifest.read_bytes() == before
        path.write_bytes(good)
        report = builds.run("out", samples, server.url, retry_failed=True)
        assert (report.complete, report.saved, report.failed, problems()) == (True, 40, {}, "")
