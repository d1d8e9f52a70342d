"""Many rows in flight at once, each settled exactly once: saved, failed or skipped."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle3_data.builders.samples.encode import make_encoder
from eagle3_data.builders.samples.files import Inputs
from eagle3_data.builders.samples.input import Form, RawRow, open_rows, parse_row
from eagle3_data.builders.samples.mask import Masker
from eagle3_data.builders.samples.messages import Conversation
from eagle3_data.builders.samples.prepare import load_tokenizer
from eagle3_data.builders.samples.template import ChatTemplate
from eagle3_data.builders.synth.answers import AnswerFile
from eagle3_data.builders.synth.dialogue import Answer, Dialogue
from eagle3_data.builders.synth.spec import SynthSpec
from eagle3_data.errors import BuildFailed, ConnectionLost, Eagle3Error, InputError, LedgerError, SampleError
from eagle3_data.server.client import Reply, ServerClient

RETRIES = 4
REST_S = 15.0
"""A server that could not be reached is asked again after this, unless none is left."""
BACKOFF_S = 1.0
"""First wait before a retry; doubles each time, with jitter."""


@dataclass(slots=True)
class SynthReport:
    """What became of every planned row; grows while the run goes on."""

    planned: int
    skipped: int = 0
    """Rows that had their answers from an earlier run."""
    saved: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    truncated: int = 0
    """Saved answers that reached the token limit."""
    retried: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def settled(self) -> int:
        return self.saved + self.skipped + sum(self.failed.values())

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of this run."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    def check(self) -> None:
        """Raises LedgerError when a run that was not interrupted lost sight of a row."""
        if not self.interrupted and self.settled != self.planned:
            raise LedgerError(
                f"saved {self.saved} + failed {dict(self.failed)} + skipped {self.skipped} != planned {self.planned}"
            )


Progress = Callable[[SynthReport], None]


class Servers:
    """Several servers as one; a request goes to the one with the fewest outstanding tokens, a lost one rests first."""

    def __init__(self, clients: Sequence[ServerClient]) -> None:
        self._load = dict.fromkeys(clients, 0)
        self._rests_until = dict.fromkeys(clients, 0.0)

    async def generate(self, prompt: Sequence[int], spec: SynthSpec, row: int) -> Reply:
        now = time.monotonic()
        client = min(self._load, key=lambda one: (self._rests_until[one] > now, self._load[one]))
        cost = len(prompt) + spec.max_new_tokens
        self._load[client] += cost
        try:
            return await client.generate(prompt, sampling=spec.sampling(row))
        except ConnectionLost:
            self._rests_until[client] = time.monotonic() + REST_S
            raise
        finally:
            self._load[client] -= cost

    async def check_health(self) -> None:
        """Raises the first server's error when none answers."""
        found = await asyncio.gather(*(client.check_health() for client in self._load), return_exceptions=True)
        errors = [error for error in found if isinstance(error, BaseException)]
        if len(errors) == len(found):
            raise errors[0]

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._load))


def synthesise(
    prompts: Inputs,
    tokenizer_or_model: Any,
    spec: SynthSpec,
    servers: Sequence[str],
    out: str | Path,
    *,
    in_flight: int = 64,
    limit: int | None = None,
    api_key: str | None = None,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> SynthReport:
    """Have the servers answer `prompts` and append the answers to `out` (JSONL), which `prepare_samples` reads.

    Rows answered before are skipped. Ctrl-C and SIGTERM keep what is finished and return with `interrupted`. Raises
    InputError for prompts that cannot be read, ManifestMismatch when `out` was begun with other settings, and
    BuildFailed when nothing at all succeeds.
    """
    tokenizer = tokenizer_or_model
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
    template, encoder = ChatTemplate(tokenizer, kwargs=spec.template_kwargs), make_encoder(tokenizer)
    spec = replace(spec, template_digest=template.digest, tokenizer_digest=encoder.digest)
    if not isinstance(prompts, str | Path | Sequence):
        prompts = list(prompts)  # counted first, then read
    planned = sum(1 for _ in _rows(prompts, limit)[1])
    form, rows = _rows(prompts, limit)
    dialogue = Dialogue(Masker(template, spec.sample_spec()), encoder, keep_truncated=spec.truncated == "keep")
    with AnswerFile(Path(out), spec) as answers:
        run = _Run(dialogue, answers, spec, SynthReport(planned), progress)
        asyncio.run(run.all(form, rows, servers, api_key, in_flight))
    run.report.check()
    return run.report


def _rows(prompts: Inputs, limit: int | None) -> tuple[Form, Iterator[RawRow]]:
    stream = open_rows(prompts)
    return stream.form, itertools.islice(stream.rows, limit)


async def _until(event: asyncio.Event) -> None:
    await event.wait()


class _Run:
    """One run over all rows."""

    def __init__(
        self, dialogue: Dialogue, answers: AnswerFile, spec: SynthSpec, report: SynthReport, progress: Progress | None
    ) -> None:
        self.dialogue, self.answers, self.spec, self.report, self._progress = dialogue, answers, spec, report, progress
        self._started = time.monotonic()
        self._servers: Servers
        self._in_a_row = 0
        """Failures since the last success."""

    async def all(
        self, form: Form, rows: Iterator[RawRow], urls: Sequence[str], api_key: str | None, in_flight: int
    ) -> None:
        self._servers = Servers([ServerClient(url, api_key=api_key) for url in urls])
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(
                NotImplementedError, RuntimeError
            ):  # not in the main thread: the caller's business
                loop.add_signal_handler(number, stop.set)
        stopped = asyncio.create_task(_until(stop))
        tasks: set[asyncio.Task[None]] = set()
        try:
            await self._servers.check_health()
            for raw in rows:
                if raw.row in self.answers.done:
                    self.report.skipped += 1
                    continue
                tasks.add(asyncio.create_task(self._row(raw, form)))
                if len(tasks) >= in_flight:
                    tasks = await self._wait(tasks, stopped)
                if stop.is_set():
                    break
            while tasks and not stop.is_set():
                tasks = await self._wait(tasks, stopped)
        finally:
            self.report.interrupted = stop.is_set()
            for task in (*tasks, stopped):
                task.cancel()
            await asyncio.gather(*tasks, stopped, return_exceptions=True)
            await self._servers.close()
            for number in (signal.SIGINT, signal.SIGTERM):
                with contextlib.suppress(NotImplementedError, RuntimeError):
                    loop.remove_signal_handler(number)
            self._tick()

    async def _wait(self, tasks: set[asyncio.Task[None]], stopped: asyncio.Task[None]) -> set[asyncio.Task[None]]:
        done, _ = await asyncio.wait({*tasks, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in done & tasks:
            task.result()  # an error of ours ends the run
        self._tick()
        if self.report.saved == 0 and self._in_a_row >= max(32, len(tasks)):
            raise BuildFailed(
                f"the first {self._in_a_row} rows all failed: {dict(self.report.failed)}",
                next=f"see {self.answers.path.with_suffix('.errors.jsonl')}",
            )
        return tasks - done

    async def _row(self, raw: RawRow, form: Form) -> None:
        row_id, attempts = str(raw.row), 0

        async def ask(prompt: Sequence[int]) -> Reply:
            nonlocal attempts
            while True:
                attempts += 1
                try:
                    return await self._servers.generate(prompt, self.spec, raw.row)
                except Eagle3Error as error:
                    if not error.retryable or attempts > RETRIES:
                        raise
                    self.report.retried += 1
                    await asyncio.sleep(BACKOFF_S * 2 ** (attempts - 1) * random.uniform(0.5, 1.5))

        try:
            row = parse_row(raw, form)
            if not isinstance(row, Conversation):
                raise InputError(f"{raw.where}: has token ids already; answers are asked for prompts")
            row_id = row.id
            self._saved(row, await self.dialogue.answer(row, ask))
        except InputError:
            raise
        except (SampleError, Eagle3Error) as error:
            self._in_a_row += 1
            self.report.failed[error.reason] += 1
            self.answers.fail(raw.row, row_id, error.reason, error.message, attempts)

    def _saved(self, row: Conversation, answers: list[Answer]) -> None:
        self.answers.save(row, answers)
        self._in_a_row = 0
        self.report.saved += 1
        self.report.truncated += answers[-1].finish_reason == "length"
        self.report.output_tokens += sum(answer.output_tokens for answer in answers)
        self.report.prompt_tokens += sum(len(answer.input_ids) - answer.output_tokens for answer in answers)

    def _tick(self) -> None:
        self.report.seconds = time.monotonic() - self._started
        if self._progress is not None:
            self._progress(self.report)
