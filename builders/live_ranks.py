"""`LiveSamples` on several ranks: rank 0 alone asks the servers and writes shards; the others ask rank 0.

A request is one connection: a JSON line with a sample's number, answered by a JSON line and, while the sample lies in
no sealed shard, by its tensors as safetensors. What is sealed every rank reads from the shards itself, so the build's
folder has to be visible to all of them. Address and a random token lie in the build's work folder, readable by its
owner alone. Nobody waits without an end: rank 0 answers within seconds, be it that the sample is still to come, and
the capture's own deadlines end that.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load, save
from torch import Tensor

from eagle3_data.builders.finished import FinishedSamples, is_finished
from eagle3_data.builders.live import START_S, LiveSamples, copy_rows, empty_sample, stored_sample
from eagle3_data.builders.samples.store import STORE, SampleStore
from eagle3_data.builders.settings import BuildConfig
from eagle3_data.capture import Alignment, CaptureSpec
from eagle3_data.errors import BuildFailed
from eagle3_data.protocol import IDS, MASK
from eagle3_data.runlock import work_folder
from eagle3_data.shards.reader import ShardSet
from eagle3_data.shards.table import COLUMNS

ANSWER_S = 5.0
"""Rank 0 answers within this, be it that the sample is still to come."""
SILENCE_S = 60.0
SEEN_S = 60.0
"""How long a shard that rank 0 has sealed may take to be seen here (network file systems)."""
RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of a distributed run; `host` is rank 0's."""

    rank: int
    world: int
    host: str

    @classmethod
    def of_environment(cls) -> Ranks:
        """As torchrun and `accelerate launch` tell it."""
        env = os.environ
        return cls(int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1")), env.get("MASTER_ADDR", "127.0.0.1"))


@contextlib.contextmanager
def open_live(
    config: BuildConfig, ranks: Ranks, *, on_text: Callable[[str], None]
) -> Iterator[LiveSamples | FarSamples | FinishedSamples]:
    """The samples of a build that is still to be finished, on any rank; once it is whole no server is asked."""
    if is_finished(config.out):
        on_text(f"{config.out} is whole: no server is needed")
        yield FinishedSamples(config.out)
        return
    if ranks.rank > 0:
        yield FarSamples(config.out)
        return
    with LiveSamples(config, on_text=on_text) as samples:
        if ranks.world == 1:
            yield samples
            return
        with LiveService(samples, config.out, ranks.host):
            yield samples


def note_path(out: Path) -> Path:
    return work_folder(out) / "live.json"


class LiveService:
    """Rank 0's side: answers the other ranks, one thread per connection."""

    def __init__(self, samples: LiveSamples, out: Path, host: str) -> None:
        self.samples, self.path, self.token = samples, note_path(out), secrets.token_hex(16)
        service = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                service.answer(cast(Any, self.rfile), cast(Any, self.wfile))

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        self._server = Server((host, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="eagle3-live-ranks", daemon=True)

    def __enter__(self) -> LiveService:
        self._thread.start()
        host, port = self._server.server_address[:2]
        hidden = self.path.with_name(f".{self.path.name}.tmp")
        hidden.unlink(missing_ok=True)
        with open(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"host": host, "port": port, "token": self.token}, file)
        os.replace(hidden, self.path)
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()

    def answer(self, asked: Any, out: Any) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):  # the other side has gone, or is none of ours
            request = json.loads(asked.readline(1 << 16))
            if not hmac.compare_digest(str(request["token"]), self.token):
                return
            try:
                head, body = self._found(request)
            except Exception as error:
                head, body = {"kind": "error", "message": str(error)}, b""
            out.write(json.dumps({**head, "nbytes": len(body)}).encode() + b"\n" + body)

    def _found(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        samples = self.samples
        if "sample" not in request:
            about = {"fingerprint": samples.fingerprint, "capture": samples.capture.to_dict()}
            return {"kind": "about", **about, "alignment": samples.alignment, "failed": samples.failed_keys()}, b""
        i = int(request["sample"])
        tensors = samples.read_within(i, request["columns"], ANSWER_S)
        if tensors is None:
            return {"kind": "coming"}, b""
        if samples.sealed(i):
            return {"kind": "sealed"}, b""
        if samples.keys[i] in samples.failed_keys():
            return {"kind": "failed"}, b""
        return {"kind": "tensors"}, save({name: tensor.contiguous() for name, tensor in tensors.items()})


class FarSamples:
    """The other ranks' side, with the interface of `LiveSamples`."""

    def __init__(self, out: Path) -> None:
        """Waits for rank 0. Raises BuildFailed when it does not come."""
        self.out = out
        about = self._first_answer()
        self.fingerprint = str(about["fingerprint"])
        self.capture = CaptureSpec.from_dict(about["capture"])
        self.alignment: Alignment = about["alignment"]
        self._failed = set(about["failed"])
        self._store = SampleStore.open(work_folder(out) / STORE)
        self.tokens = self._store.tokens
        self.keys = [sample.key for sample in self._store]
        self._sealed: dict[str, tuple[ShardSet, int]] = {}
        self._opening = threading.Lock()

    def __len__(self) -> int:
        return len(self._store)

    def expect(self, samples: Sequence[int]) -> None:
        """Rank 0 knows the order of all ranks."""

    def read(self, i: int, columns: Sequence[str] | None = None) -> dict[str, Tensor]:
        """As `LiveSamples.read`. Raises BuildFailed when the capture, or rank 0, has ended without this sample."""
        names = tuple(columns or (name for name in COLUMNS if name in {name for name, _, _ in self.capture.tensors(1)}))
        key = self.keys[i]
        if set(names) <= {IDS, MASK}:
            return stored_sample(self._store, i, names, failed=key in self._failed)
        while key not in self._sealed:
            head, body = self._ask({"sample": i, "columns": names})
            if head["kind"] == "tensors":
                return load(body)
            if head["kind"] == "failed":
                self._failed.add(key)
                return empty_sample(self.capture, int(self.tokens[i]), names)
            if head["kind"] == "sealed":
                self._open_until_seen(key)
        shards, number = self._sealed[key]
        return shards.read(number, names)

    def read_into(self, i: int, out: Mapping[str, Tensor]) -> None:
        """As `ShardSet.read_into`."""
        copy_rows(self.read(i, tuple(out)), out)

    def _open_until_seen(self, key: str) -> None:
        deadline = time.monotonic() + SEEN_S
        with self._opening:
            while key not in self._sealed:
                shards = ShardSet.open(self.out)
                self._sealed = {name: (shards, number) for number, name in enumerate(shards.keys)}
                if key not in self._sealed and time.monotonic() > deadline:
                    raise BuildFailed(
                        f"rank 0 has sealed sample {key}, and {self.out} does not show it on {socket.gethostname()}",
                        next="the build's folder must be on a file system that all ranks share",
                    )
                if key not in self._sealed:
                    time.sleep(RETRY_S)

    def _first_answer(self) -> dict[str, Any]:
        deadline = time.monotonic() + START_S
        while True:
            # a note of an earlier run leads nowhere, or to somebody who hangs up
            with contextlib.suppress(BuildFailed):
                return self._ask({})[0]
            if time.monotonic() > deadline:
                raise BuildFailed(
                    f"rank 0 did not begin to capture within {START_S:.0f} s",
                    next=f"see its output; {self.out} must be on a file system that all ranks share",
                )
            time.sleep(RETRY_S)

    def _ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        try:
            note = json.loads(note_path(self.out).read_text())
            with socket.create_connection((note["host"], note["port"]), SILENCE_S) as line:
                line.sendall(json.dumps({**request, "token": note["token"]}).encode() + b"\n")
                with line.makefile("rb") as answer:
                    head = json.loads(answer.readline())
                    body = answer.read(head["nbytes"])
                    if len(body) != head["nbytes"]:
                        raise ConnectionError("it hung up in the middle")
        except (OSError, ValueError) as error:
            raise BuildFailed(f"rank 0, which captures for all ranks, does not answer: {error}") from error
        if head["kind"] == "error":
            raise BuildFailed(str(head["message"]))
        return head, body
