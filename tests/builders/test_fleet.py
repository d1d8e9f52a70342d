"""A build in parts with workers that are threads: dealing, failures, what is said. On a Ray cluster: test_ray.py."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3_data.builders.fleet import Crew, build_fleet, deal
from eagle3_data.builders.fleet_part import Outcome, PartJob, work_part
from eagle3_data.builders.ray_crew import RayCrew
from eagle3_data.builders.settings import BuildReport
from eagle3_data.builders.stored import recall
from eagle3_data.errors import BuildFailed, ConfigError, ManifestMismatch
from eagle3_data.journal import journal_path, read_tail
from eagle3_data.manifest import Manifest
from eagle3_data.status import read_status
from eagle3_data.verify import verify
from tests.builders.conftest import Builds, write_samples
from tests.builders.test_build import check_content
from tests.replay import Faults


class Threads:
    """A crew of this process."""

    def __init__(self, lost: tuple[int, ...] = ()) -> None:
        self.lost = lost
        self.jobs: list[PartJob] = []
        self._done: dict[int, Outcome] = {}
        self._left = 0
        self._changed = threading.Condition()
        self.stopped = self.abandoned = 0

    def start(self, job: PartJob) -> None:
        self.jobs.append(job)
        self._left += 1
        threading.Thread(target=self._work, args=(job,), daemon=True).start()

    def _work(self, job: PartJob) -> None:
        if job.index in self.lost:
            outcome = Outcome(error="its worker ended (OutOfMemoryError)", next="give it memory")
        else:
            outcome = Outcome.from_json(work_part(PartJob.from_json(job.to_json())).to_json())
        with self._changed:
            self._done[job.index] = outcome
            self._changed.notify()

    def ended(self, timeout_s: float) -> dict[int, Outcome]:
        with self._changed:
            self._changed.wait_for(lambda: self._done, timeout_s)
            found, self._done = self._done, {}
            return found

    def stop(self) -> None:
        self.stopped += 1

    def abandon(self) -> None:
        self.abandoned += 1


def fleet(
    builds: Builds, out: str, samples: Path, *urls: str, crew: Threads | None = None, **changes: Any
) -> BuildReport:
    threads = crew or Threads()

    @contextlib.contextmanager
    def open_crew() -> Iterator[Crew]:
        yield threads

    config = builds.config(out, samples, *urls, engine="ray", **changes)
    return build_fleet(config, open_crew, on_tick=builds.ticks.append, on_text=builds.texts.append)


def test_every_server_is_dealt() -> None:
    assert [deal("abc", i, 3) for i in range(3)] == [("a",), ("b",), ("c",)]
    assert [deal("abcde", i, 2) for i in range(2)] == [("a", "c", "e"), ("b", "d")]
    assert [deal("ab", i, 3) for i in range(3)] == [("a",), ("b",), ("a",)]


def test_parts_are_one_build(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 60)
    with builds.server(spool="a") as one, builds.server(spool="b") as two:
        report = fleet(builds, "out", samples, one.url, two.url)
        assert (report.complete, report.planned, report.saved, report.sent) == (True, 60, 60, 60)
        assert len(one.requests) + len(two.requests) == 60
        assert min(len(one.requests), len(two.requests)) > 0
        again = fleet(builds, "out", samples, one.url)
        assert (again.complete, again.sent, again.resumed) == (True, 0, 60)
        builds.run("calm", samples, one.url)
        check_content(builds.folder / "out", samples, one.spec)
    assert builds.shards("out") == builds.shards("calm")
    for name in builds.shards("out"):
        linked = next((builds.folder / "out/.build/parts").glob(f"*/data/{name}"))
        assert linked.samefile(builds.folder / "out/data" / name), "no byte lies on the disk twice"
    assert verify(builds.folder / "out").ok
    merged, calm = Manifest.load(builds.folder / "out"), Manifest.load(builds.folder / "calm")
    assert (merged.plan, merged.content_id, merged.fingerprint) == (calm.plan, calm.content_id, calm.fingerprint)
    assert sum("rows of" in text for text in builds.texts) == 2, "rendered once for all parts, and once for `calm`"
    with builds.server(spool="c") as three:
        shutil.rmtree(builds.folder / "out/.build/parts")
        with pytest.raises(ConfigError, match="is complete and its parts are gone"):
            fleet(builds, "out", samples, three.url)
        assert three.requests == []
    ticks = read_tail(journal_path(builds.folder / "out"))
    assert {(tick.of, tick.tokens_of) for tick in ticks} == {(60, calm.plan.tokens)}
    assert {tick.nbytes_of for tick in ticks} == {calm.plan.nbytes}


def test_parts_that_fail_are_named_and_the_next_call_goes_on(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 60)
    faults = Faults(reply=dict.fromkeys(range(10, 900), "reset"))
    with builds.server(spool="a") as one, builds.server(faults, spool="b") as two:
        real = two.info
        two.info = lambda: real() if len(two.requests) < 10 else {"protocol": 99}  # type: ignore[method-assign]
        with pytest.raises(BuildFailed, match=r"1 of 2 parts did not finish: part 1 .*no server alive") as found:
            fleet(builds, "out", samples, one.url, two.url, server_timeout_s=0.5, max_inflight=1)
        assert two.url in found.value.message
        assert "repeat the same command (--server may name others)" in found.value.next
        assert read_status(builds.folder / "out").state == "FAILED"
        kept = read_status(builds.folder / "out").done
        assert 30 <= kept < 60, "the other part went on to its end"
        report = fleet(builds, "out", samples, one.url)
        assert (report.resumed, report.sent, report.saved) == (kept, 60 - kept, 60)
        check_content(builds.folder / "out", samples, one.spec)
    assert verify(builds.folder / "out").ok


def test_a_refused_command_leaves_the_settings_of_the_parts(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 20)
    other = write_samples(builds.folder / "o.jsonl", 20, seed=5)
    folders = [builds.folder / "out", *(builds.folder / f"out/.build/parts/{i}" for i in range(2))]
    with builds.server(spool="a") as one, builds.server(spool="b") as two:
        fleet(builds, "out", samples, one.url, two.url)
        before = [recall(folder) for folder in folders]
        assert before[0].engine == "ray"
        crew = Threads()
        with pytest.raises(ManifestMismatch, match="dataset"):
            fleet(builds, "out", samples, one.url, two.url, crew=crew, dataset="other")
        with pytest.raises(ManifestMismatch, match="ids and masks"):
            fleet(builds, "out", other, one.url, two.url, crew=crew)
        assert crew.jobs == [], "no part was begun"
        assert [recall(folder) for folder in folders] == before
        assert fleet(builds, "out", samples, one.url, two.url).sent == 0


def test_a_lost_worker_is_said(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 30)
    with builds.server() as server:
        with pytest.raises(BuildFailed, match=r"part 1 .*OutOfMemoryError") as found:
            fleet(builds, "out", samples, server.url, crew=Threads(lost=(1,)), workers=2)
        assert found.value.next.startswith("give it memory; repeat the same command")
        assert fleet(builds, "out", samples, server.url).saved == 30


def test_a_worker_elsewhere_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine without the folder, or with another version."""
    monkeypatch.chdir(tmp_path)  # a worker goes to the driver's folder, and here it is this process
    job = PartJob(index=0, folder="/nowhere", servers=("http://h:1",), api_key=None, retry_failed=False, cwd="/")
    found = work_part(job)
    assert "does not see /nowhere" in found.error
    assert "every worker mounts" in found.next
    assert "the driver 0" in work_part(replace(job, folder=str(tmp_path), version="0")).error
    assert "holds no build" in work_part(replace(job, folder=str(tmp_path))).error


class Ray:
    """As much of Ray as `RayCrew` asks: tasks that end in the errors that Ray has for lost workers."""

    class exceptions:
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            pass

        class WorkerCrashedError(RayError):
            pass

    def __init__(self) -> None:
        self.strategies: list[object] = []
        self.cancelled: list[tuple[str, bool]] = []

    def nodes(self) -> list[dict[str, object]]:
        names = (("one", "10.0.0.1", "1"), ("two", "10.0.0.2", "2"), ("old", "10.0.0.3", "3"))
        return [
            {"NodeID": n * 56, "NodeManagerAddress": address, "NodeManagerHostname": name, "Alive": name != "old"}
            for name, address, n in names
        ]

    def get_runtime_context(self) -> Ray:
        return self

    def get_node_id(self) -> str:
        return "a" * 56

    def remote(self, **options: object) -> Any:
        return lambda function: self

    def options(self, *, scheduling_strategy: object, name: str) -> Any:
        self.strategies.append(scheduling_strategy)
        return SimpleNamespace(remote=lambda job: name)

    def wait(self, refs: list[str], timeout: float) -> tuple[list[str], list[str]]:
        return refs, []

    def cancel(self, ref: str, force: bool = False) -> None:
        self.cancelled.append((ref, force))

    def get(self, ref: str) -> str:
        if ref.endswith("0"):
            raise self.exceptions.WorkerCrashedError("The worker died unexpectedly.\nMore words.")
        if ref.endswith("1"):
            raise self.exceptions.RayTaskError("Traceback\n  File x\nZeroDivisionError: division by zero")
        return Outcome(error="said by the part", next="n").to_json()


def test_lost_workers_and_places_on_a_cluster() -> None:
    pytest.importorskip("ray")
    ray = Ray()
    crew = RayCrew(ray)
    for index, host in enumerate(("10.0.0.2", "one", "10.0.0.3", "127.0.0.1")):
        url = f"http://{host}:30000"
        crew.start(PartJob(index=index, folder="/f", servers=(url,), api_key=None, retry_failed=False, cwd="/"))
    two, one, elsewhere, here = ray.strategies
    assert [(place.node_id, place.soft) for place in (two, one, here)] == [  # type: ignore[attr-defined]
        ("2" * 56, True),
        ("1" * 56, True),
        ("a" * 56, False),
    ]
    assert elsewhere == "DEFAULT", "a machine that is not Ray's, or not alive: anywhere"
    crew.stop()
    crew.abandon()
    assert [force for _, force in ray.cancelled] == [False] * 4 + [True] * 4
    found = crew.ended(1.0)
    assert found[0].error == "its worker ended (WorkerCrashedError): The worker died unexpectedly."
    assert found[1].error == "its worker ended (RayTaskError): ZeroDivisionError: division by zero"
    assert found[2].error == "said by the part"


def test_too_many_failures_in_all_parts_end_it(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 80)
    crew = Threads()
    with builds.server(Faults(reply=dict.fromkeys(range(40, 900), "400"))) as server:
        server.delay_s = 0.02
        with pytest.raises(BuildFailed, match="samples failed"):
            fleet(
                builds,
                "out",
                samples,
                server.url,
                crew=crew,
                workers=2,
                max_failure_share=0.05,
                interval_s=0.01,
                max_inflight=1,
            )
        server.faults = Faults()
        report = fleet(builds, "out", samples, server.url, retry_failed=True)
        assert (report.saved, report.failed) == (80, {})
        check_content(builds.folder / "out", samples, server.spec)
    assert crew.stopped <= 1
    assert verify(builds.folder / "out").ok


def test_failed_samples_are_retried_in_their_parts(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 60)
    with builds.server(Faults(reply={7: "400", 30: "400"})) as server:
        first = fleet(builds, "out", samples, server.url, workers=2, max_failure_share=0.2)
        assert (first.complete, first.saved, first.failed) == (True, 58, {"rejected": 2})
        end = read_tail(journal_path(builds.folder / "out"))[-1]
        assert 0 < end.failed_tokens == end.tokens_of - end.tokens
        before = builds.shards("out")
        with pytest.raises(ConfigError, match="begun with --engine ray"):
            builds.run("out", samples, server.url, retry_failed=True)
        second = fleet(builds, "out", samples, server.url, workers=2, retry_failed=True)
        assert (second.complete, second.saved, second.failed, second.sent) == (True, 60, {}, 2)
        assert before.items() < builds.shards("out").items()
        assert verify(builds.folder / "out").ok
        assert (builds.folder / "out/failures.jsonl").read_text() == ""
        check_content(builds.folder / "out", samples, server.spec)


def test_what_does_not_go_with_it_is_refused(builds: Builds) -> None:
    samples = write_samples(builds.folder / "s.jsonl", 30)
    for changes, words in (
        ({"mirror": "org/name"}, "has no --mirror"),
        ({"part": (0, 2)}, "leave out --shards"),
        ({"workers": 0}, "--workers must be > 0"),
        ({"matching": "token_count", "spool": builds.folder}, "matching identity"),
    ):
        with pytest.raises(ConfigError, match=words):
            builds.config("out", samples, "http://h:1", engine="ray", **changes)
    with pytest.raises(ConfigError, match="--engine 'mpi' is not one of local, ray"):
        builds.config("out", samples, "http://h:1", engine="mpi")
    with pytest.raises(ConfigError, match="--workers needs --engine ray"):
        builds.config("out", samples, "http://h:1", workers=2)
    with builds.server() as server:
        builds.run("local", samples, server.url)
        with pytest.raises(ConfigError, match="begun with --engine local"):
            fleet(builds, "local", samples, server.url)
        fleet(builds, "out", samples, server.url, workers=2)
        with pytest.raises(ConfigError, match="begun with 2 workers, now there are to be 3"):
            fleet(builds, "out", samples, server.url, workers=3)
