"""`eagle3-data demo`: the whole way on a real model, on a CPU, in about ten minutes. Every stage can be repeated."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eagle3_data import durable
from eagle3_data.cli.progress import RunProgress, console, say
from eagle3_data.errors import BuildFailed

if TYPE_CHECKING:
    from eagle3_data.builders.settings import BuildReport
    from eagle3_data.server.process import ServerProcess
    from eagle3_data.train.evaluate import EvalReport

HELDOUT = 8
ANSWER_TOKENS = 160
SPOOL_BYTES = 512 << 20
NAME = "eagle3_data/smollm2_demo"


@dataclass(frozen=True, slots=True)
class Folders:
    """Where the demo keeps its things."""

    out: Path

    @property
    def answers(self) -> Path:
        return self.out / "answers.jsonl"

    @property
    def data(self) -> Path:
        return self.out / "data"

    @property
    def run(self) -> Path:
        return self.out / "run"

    @property
    def draft(self) -> Path:
        return self.out / "draft"

    @property
    def log(self) -> Path:
        return self.out / "sglang.log"


class Interrupted(Exception):
    """Ctrl-C inside a stage that finished its own work in order."""


def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for everything the demo makes; a second run goes on in it.")] = Path(
        "demo"
    ),
    minutes: Annotated[float, typer.Option(help="Training time.")] = 2.0,
    prompts: Annotated[int, typer.Option(help="Prompts to answer, at most 64.")] = 64,
) -> None:
    """Serve SmolLM2-135M with capture, have it answer, build, verify, load, train a draft, and measure it.

    Example: eagle3-data demo --out demo
    """
    started = time.monotonic()
    try:
        run_demo(Folders(out.resolve()), minutes, prompts, started)
    except (Interrupted, KeyboardInterrupt):
        say("interrupted: everything finished so far is kept; the same command goes on from here")
        sys.exit(130)


def run_demo(folders: Folders, minutes: float, prompts: int, started: float) -> None:
    """All stages in order. Raises Interrupted, and the family of `eagle3_data.errors`."""
    from eagle3_data.cli.demo_report import Summary, show, write_report

    folders.out.mkdir(parents=True, exist_ok=True)
    model = stage_model(folders)
    report = stage_capture(folders, model, prompts)
    stage_verify(folders)
    stage_load(folders)
    training = stage_train(folders, model, minutes)
    evaluation = stage_evaluate(folders, model)
    summary = Summary.of(folders, report, training, evaluation, time.monotonic() - started)
    write_report(folders, summary)
    show(summary)


def head(number: int, text: str) -> None:
    console.rule(f"[bold]{number}/7[/bold] {text}", align="left")


def stage_model(folders: Folders) -> Path:
    """The target's checkpoint, converted once."""
    from eagle3_data.builders.smollm2 import make_checkpoint

    head(1, "the target: SmolLM2-135M-Instruct, real weights from a package")
    model = make_checkpoint(folders.out / "model")
    say(f"checkpoint: {model}")
    return model


def stage_capture(folders: Folders, model: Path, prompts: int) -> BuildReport:
    """Answers by the target and their states; the server is started only when one of them is missing."""
    from eagle3_data.builders.build import build
    from eagle3_data.builders.datasets.smollm2_demo import RECIPE
    from eagle3_data.builders.pool import FlowConfig
    from eagle3_data.builders.settings import BuildConfig
    from eagle3_data.builders.synth import SynthSpec, synthesise

    head(2, f"the patched SGLang server answers {prompts} prompts, then prefills them for their hidden states")
    questions = split_prompts(folders, "train", prompts)
    saved = saved_report(folders, prompts)
    if saved is not None:
        say(f"answers and shards are complete: {saved.saved} samples in {folders.data}")
        return saved
    with serving(folders, model) as server:
        with synth_bar(prompts) as progress:
            answers = synthesise(
                questions,
                model,
                SynthSpec(max_new_tokens=ANSWER_TOKENS),
                [server.url],
                folders.answers,
                progress=progress,
            )
        if answers.interrupted:
            raise Interrupted
        say(f"{answers.saved + answers.skipped} answers, {answers.output_tokens:,} tokens written by the target itself")
        config = BuildConfig(
            out=folders.data,
            inputs=(str(folders.answers),),
            model=str(model),
            servers=(server.url,),
            dataset=RECIPE.name,
            layers=RECIPE.capture.layers,
            shard_bytes=RECIPE.shard_bytes,
            flow=FlowConfig(max_inflight=16),
            interval_s=1.0,
        )
        with RunProgress("extract") as bar:
            report = build(config, on_tick=bar, on_text=say)
    if not report.complete:
        raise Interrupted
    durable.write_text(folders.out / "build.json", json.dumps({**to_json(report), "prompts": prompts}) + "\n")
    return report


def saved_report(folders: Folders, prompts: int) -> BuildReport | None:
    """The report of an earlier run, when the build it speaks of is still there and complete."""
    from eagle3_data.builders.settings import BuildReport
    from eagle3_data.manifest import MANIFEST, Manifest

    path = folders.out / "build.json"
    if not path.exists() or not (folders.data / MANIFEST).exists():
        return None
    data = json.loads(path.read_text())
    if data.pop("prompts") != prompts or Manifest.load(folders.data).state != "complete":
        return None
    return BuildReport(**{**data, "out": folders.data})


@contextlib.contextmanager
def serving(folders: Folders, model: Path) -> Iterator[ServerProcess]:
    """The patched server, with a spool in memory where there is room for it."""
    from eagle3_data.protocol import SpoolConfig
    from eagle3_data.server.process import ServerConfig, ServerProcess

    shm = Path("/dev/shm")
    roomy = shm.is_dir() and shutil.disk_usage(shm).free > 4 * SPOOL_BYTES
    spool = shm / f"eagle3-demo-{folders.out.name}" if roomy else folders.out / "spool"
    config = ServerConfig(
        model=str(model),
        spool=spool,
        spool_config=SpoolConfig(high_water_bytes=SPOOL_BYTES, pinned_bytes=SPOOL_BYTES),
        device="cpu",
        dtype="float32",
    )
    server = ServerProcess(config, log=folders.log, on_progress=None)
    with console.status("starting SGLang (20 to 60 seconds)"):
        server.start()
    try:
        say(f"server: {server.url}, spool {spool}")
        yield server
    finally:
        server.stop()
        shutil.rmtree(spool, ignore_errors=True)


def split_prompts(folders: Folders, split: str, count: int) -> Path:
    """The shipped prompts of one split, as a file."""
    from eagle3_data.builders.datasets.smollm2_demo import RECIPE

    assert RECIPE.prompts is not None
    rows = [json.loads(line) for line in RECIPE.prompts.read_text().splitlines()]
    chosen = [row for row in rows if row["split"] == split][:count]
    if len(chosen) < count:
        raise BuildFailed(f"{count} {split} prompts were asked for, the package ships {len(chosen)}")
    path = folders.out / f"prompts.{split}.jsonl"
    durable.write_text(path, "".join(json.dumps(row) + "\n" for row in chosen))
    return path


@contextlib.contextmanager
def synth_bar(total: int) -> Iterator[Any]:
    """A progress bar over a `SynthReport`."""
    columns = (
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("answers", total=total, speed="")
        yield lambda report: bar.update(task, completed=report.settled, speed=f"{report.tokens_per_s:,.0f} tok/s")


def stage_verify(folders: Folders) -> None:
    """Every byte of the build against its manifest. Raises BuildFailed."""
    from eagle3_data.status import format_bytes
    from eagle3_data.verify import verify

    head(3, "verify: every byte against the manifest")
    report = verify(folders.data)
    if not report.ok:
        raise BuildFailed(f"the build does not verify: {report.problems[0]}", next=f"eagle3-data verify {folders.data}")
    say(
        f"OK: {report.samples} samples, {report.tokens:,} tokens, {report.shards} shards, {format_bytes(report.nbytes)}"
    )


def stage_load(folders: Folders) -> None:
    """`load_dataset` by name, streaming, as any user would."""
    import eagle3_data
    from eagle3_data.loading import publish_local

    head(4, f'load_dataset("{NAME}", streaming=True)')
    publish_local(NAME.partition("/")[2], folders.data)
    stream = eagle3_data.load_dataset(NAME, split="train", streaming=True)
    samples = tokens = 0
    for sample in stream:
        if not samples:
            for name in ("input_ids", "loss_mask", "aux_hidden_states", "last_hidden_state"):
                say(f"  {name:18} {list(sample[name].shape)} {sample[name].dtype}")
        samples += 1
        tokens += len(sample["input_ids"])
    say(f"{samples} samples, {tokens:,} tokens streamed from {stream.num_shards} shards")


def stage_train(folders: Folders, model: Path, minutes: float) -> dict[str, Any]:
    """Train a draft within the time, export it; an interrupted run goes on. Raises Interrupted."""
    from eagle3_data.shards import ShardSet
    from eagle3_data.train.config import parse_config
    from eagle3_data.train.export import export_draft
    from eagle3_data.train.presets import preset_values
    from eagle3_data.train.trainer import Trainer

    head(5, f"train an EAGLE-3 draft for {minutes:g} minutes, export it for SGLang")
    data = ShardSet.open(folders.data)
    path = folders.out / "train.json"
    if path.exists():
        known: dict[str, Any] = json.loads(path.read_text())
        if known["data"] == data.fingerprint and known["minutes"] == minutes and folders.draft.exists():
            say(f"trained: loss {known['first_loss']:.3f} -> {known['last_loss']:.3f}, draft in {folders.draft}")
            return known
    values = preset_values("smollm2_demo", folder=folders.data, output=folders.run)
    values.setdefault("target", {})["model"] = str(model)
    values["optim"]["max_minutes"] = minutes
    report = Trainer(parse_config(values, source="preset smollm2_demo"), data).run()
    if report.stopped == "interrupted":
        raise Interrupted
    exported = export_draft(
        folders.run, folders.draft, engine="sglang", dtype="float32", target=str(model), draft_tokens=3
    )
    say(f"draft: {exported.folder}")
    result = {
        "data": data.fingerprint,
        "minutes": minutes,
        "steps": report.state.step,
        "tokens": report.state.tokens,
        "first_loss": report.state.first_loss,
        "last_loss": report.state.last_loss,
        "simulated_acceptance": report.state.best_acceptance,
    }
    durable.write_text(path, json.dumps(result) + "\n")
    return result


def stage_evaluate(folders: Folders, model: Path) -> dict[str, Any]:
    """Acceptance length in the real server on held-out prompts, and the same answers without the draft."""
    from eagle3_data.hub.digest import file_xxh3
    from eagle3_data.train.eval_prompts import read_prompts
    from eagle3_data.train.evaluate import evaluate_draft, measure_plain
    from eagle3_data.train.measure import EvalConfig

    head(6, f"the real server decodes {HELDOUT} held-out prompts with the draft, and without")
    path, digest = folders.out / "evaluation.json", file_xxh3(folders.draft / "model.safetensors")
    if path.exists() and json.loads(path.read_text())["draft_digest"] == digest:
        known: dict[str, Any] = json.loads(path.read_text())
        say(f"measured: acceptance length {known['overall']['acceptance_length']:.2f}")
        return known
    prompts = read_prompts(split_prompts(folders, "heldout", HELDOUT), str(model), trust_remote_code=False, limit=None)
    config = EvalConfig(target=str(model), max_new_tokens=96, concurrency=HELDOUT, device="cpu", dtype="float32")
    with console.status("decoding without the draft"):
        plain = measure_plain(prompts, config, log=folders.log)
    with console.status("decoding with the draft"):
        report: EvalReport = evaluate_draft(folders.draft, prompts, config, plain=plain, log=folders.log)
    say(f"acceptance length {report.overall.acceptance_length:.2f}; {report.equal_answers} of {HELDOUT} answers equal")
    result = {**report.to_dict(), "draft_digest": digest}
    durable.write_text(path, json.dumps(result) + "\n")
    return result


def to_json(report: BuildReport) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(report), "out": str(report.out)}
