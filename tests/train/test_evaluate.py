"""The numbers of an evaluation from answers made by hand, and prompts in both forms."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3_data.cli import evaluate as cli
from eagle3_data.errors import ConfigError, InputError
from eagle3_data.server.client import ServerClient
from eagle3_data.server.command import Device, server_command
from eagle3_data.train.acceptance import Acceptance, Answer
from eagle3_data.train.compare import compare
from eagle3_data.train.eval_hints import hints
from eagle3_data.train.eval_prompts import EvalPrompt, heldout_prompts, read_prompts
from eagle3_data.train.evaluate import EvalReport, make_report, server_config
from eagle3_data.train.export import export_draft
from eagle3_data.train.measure import Decoder, EvalConfig, Measured, measure
from tests.builds import make_build
from tests.train.fakes import random_samples
from tests.train.test_export import checkpoint


def answer(
    tokens: int, verifications: int, histogram: tuple[int, ...], category: str = "a", repeat: bool = False
) -> Answer:
    accepted = sum(k * n for k, n in enumerate(histogram))
    ids = tuple([7] * tokens if repeat else range(tokens))
    return Answer(EvalPrompt("x", category, (1, 2)), ids, verifications, accepted, histogram)


def test_acceptance_is_weighted_by_verifications() -> None:
    """10 tokens in 9 verifications and 90 in 30: 100 / 39, not the mean of 1.11 and 3."""
    found = Acceptance.of([answer(10, 9, (9, 0, 0, 0)), answer(90, 30, (5, 5, 6, 14))])
    assert found.acceptance_length == pytest.approx(100 / 39)
    assert found.accepted_per_step == pytest.approx((5 + 12 + 42) / 39)
    assert found.by_position == pytest.approx([25 / 39, 20 / 39, 14 / 39])


def test_an_answer_of_one_token_says_nothing() -> None:
    found = Acceptance.of([answer(1, 0, ()), answer(8, 4, (0, 4))])
    assert (found.answers, found.acceptance_length) == (2, 2.0)
    assert Acceptance.of([]).acceptance_length == 1.0


def test_repeating_answers_are_flagged_and_left_out_of_one_row() -> None:
    answers = [answer(40, 10, (0, 0, 0, 10), repeat=True), answer(40, 40, (40,), category="b")]
    config = EvalConfig(target="t")
    plain = Measured([answers[0], answer(39, 0, ())], [50.0])
    report = make_report(Measured(answers, [100.0]), plain, config, draft="d", took_turns=False)
    assert report.overall.low_diversity == 1
    assert report.overall.acceptance_length == pytest.approx(80 / 50)
    assert report.diverse_only.acceptance_length == 1.0
    assert report.by_category["a"].acceptance_length == 4.0
    assert (report.speedup, report.equal_answers) == (2.0, 1)
    assert json.loads(json.dumps(report.to_dict()))["speedup"] == 2.0


def test_prompts_are_rendered_with_the_chat_template(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    file = tmp_path / "p.jsonl"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    file.write_text(
        json.dumps({"prompt": "hello fox", "source": "s"}) + "\n\n" + json.dumps({"messages": messages}) + "\n"
    )
    prompts = read_prompts(file, str(tiny_llama), trust_remote_code=False, limit=None)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    assert tokenizer.decode(prompts[0].input_ids) == "<|user|>hello fox</s><|assistant|>"
    assert tokenizer.decode(prompts[1].input_ids) == "<|system|>be brief</s><|user|>hi</s><|assistant|>"
    assert [p.category for p in prompts] == ["s", "all"]
    file.write_text(json.dumps({"prompt": "one\u2028line\x85of text"}, ensure_ascii=False) + "\n")
    (prompt,) = read_prompts(file, str(tiny_llama), trust_remote_code=False, limit=None)
    assert "one\u2028line" in tokenizer.decode(prompt.input_ids)
    file.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(InputError, match="not UTF-8"):
        read_prompts(file, str(tiny_llama), trust_remote_code=False, limit=None)
    file.write_text('{"prompt": "x"}\nnot json\n')
    with pytest.raises(InputError, match=r"p\.jsonl:2"):
        read_prompts(file, str(tiny_llama), trust_remote_code=False, limit=None)
    file.write_text('{"prompt": "x"}\n')
    with pytest.raises(ConfigError, match="tokenizer"):
        read_prompts(file, str(tmp_path), trust_remote_code=False, limit=None)


def test_heldout_prompts_end_before_the_first_answer() -> None:
    data = random_samples([10, 20], width=8, vocab=50)
    prompts = heldout_prompts(data, [1], limit=None)
    assert prompts[0].input_ids == tuple(data.samples[1]["input_ids"][:10].tolist())


def test_no_more_samples_are_read_than_prompts_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a request to a mirror."""
    data, read = random_samples([10, 20, 30, 40], width=8, vocab=50), []
    real = data.read
    monkeypatch.setattr(data, "read", lambda i, *columns: (read.append(i), real(i, *columns))[1])
    assert len(heldout_prompts(data, [3, 1, 0, 2], limit=2)) == 2
    assert read == [3, 1]


def test_prompts_of_a_mirror_are_those_of_the_build(tmp_path: Path) -> None:
    make_build(tmp_path / "build", [20, 30, 40, 50, 60], per_shard=2)
    local = cli._prompts(None, tmp_path / "build", None, "t", False, 3)
    far = cli._prompts(None, Path(f"file://{tmp_path / 'build'}"), None, "t", False, 3)
    assert len(local) == 3
    assert far == local


def test_nothing_to_measure_and_nobody_to_ask() -> None:
    config, nobody = EvalConfig(target="t"), "http://127.0.0.1:1"
    with pytest.raises(ConfigError, match="no prompt"):
        asyncio.run(measure([Decoder(nobody, True)], [], config))
    for nothing in ({"rounds": 0}, {"concurrency": 0}, {"max_new_tokens": 1}):
        with pytest.raises(ConfigError, match="measure nothing"):
            EvalConfig(target="t", **nothing)  # type: ignore[arg-type]
    assert hints(nobody, config) == []  # hints alone: the evaluation itself says what is wrong


def test_a_speedup_compares_each_round_with_the_one_beside_it() -> None:
    """The host is half as fast in the second round: for both servers, when they take turns."""
    answers, config = [answer(8, 4, (0, 4))], EvalConfig(target="t", rounds=3)
    draft, plain = Measured(answers, [120.0, 60.0, 130.0]), Measured(answers, [100.0, 50.0, 100.0])
    turns = make_report(draft, plain, config, draft="d", took_turns=True)
    assert (turns.tokens_per_s, turns.plain_tokens_per_s) == (120.0, 100.0)
    assert turns.speedups == pytest.approx([1.2, 1.2, 1.3])
    assert turns.speedup == pytest.approx(1.2)
    apart = make_report(draft, plain, config, draft="d", took_turns=False)
    assert len(apart.speedups) == 9
    assert (min(apart.speedups), max(apart.speedups)) == pytest.approx((0.6, 2.6))  # what nobody can tell from chance
    alone = make_report(draft, None, config, draft="d", took_turns=False)
    assert (alone.speedups, alone.speedup) == ([], None)


def test_a_running_server_is_asked_what_makes_its_rate_unfair(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, object] = {}

    async def server_info(_: ServerClient) -> dict[str, object]:
        return told

    monkeypatch.setattr(ServerClient, "server_info", server_info)
    config = EvalConfig(target="t", concurrency=64)
    assert hints("http://one", config) == []
    told |= {"disable_radix_cache": False, "internal_states": [{"effective_max_running_requests_per_dp": 24}] * 2}
    limit, cached = hints("http://one", config)
    assert "48 requests at once" in limit
    assert "--disable-radix-cache" in cached
    told["disable_radix_cache"] = True
    assert hints("http://one", replace(config, concurrency=48)) == []
    told["internal_states"] = ["somebody else's"]
    assert hints("http://one", config) == []
    told = ["somebody else's"]  # type: ignore[assignment]
    assert hints("http://one", config) == []


def test_as_many_requests_run_at_once_as_are_sent() -> None:
    for draft in (Path("draft"), None):
        arguments = server_config(EvalConfig(target="t", concurrency=64), draft).extra_args
        assert arguments[arguments.index("--max-running-requests") + 1] == "64"


def test_server_arguments_win_last() -> None:
    config = server_config(EvalConfig(target="t", device="cpu", server_args=("--x", "1")), Path("draft"))
    assert config.draft == "draft"
    assert config.extra_args[-2:] == ("--x", "1")
    assert server_config(EvalConfig(target="t"), None).draft is None


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_draft_is_measured_as_export_says_it_is_served(tmp_path: Path, device: Device) -> None:
    """A draft with a sliding window was measured with full attention."""
    checkpoint(tmp_path / "c", sliding_window_tokens=16, latent_attention=True, target_quantised=True)
    export = export_draft(tmp_path / "c", tmp_path / "draft")
    config = server_config(EvalConfig(target="t", device=device, server_args=("--x",)), export.folder)
    arguments = " ".join(server_command(config, port=1, native=True))
    told = ["--speculative-draft-window-size 16", "--speculative-draft-model-quantization unquant"]
    told += ["--speculative-draft-attention-backend fa3"] if device == "cuda" else []
    for argument in told:
        assert argument in arguments
        assert argument in export.command
    assert arguments.endswith(" --x")
    assert ("fa3" in arguments) == (device == "cuda")
    assert "speculative" not in " ".join(server_config(EvalConfig(target="t"), None).extra_args)
    (export.folder / "serving.json").write_text("{}")
    with pytest.raises(ConfigError, match="export the draft again"):
        server_config(EvalConfig(target="t"), export.folder)


def measured(lengths: list[int], verifications: list[int], rate: float, repeat: int | None = None) -> Measured:
    answers = []
    for place, (tokens, checks) in enumerate(zip(lengths, verifications, strict=True)):
        ids = tuple([7] * tokens if place == repeat else range(tokens))
        answers.append(Answer(EvalPrompt(f"p{place}", "a", (1, 2)), ids, checks, tokens - checks, (0, checks)))
    return Measured(answers, [rate])


def report_of(found: Measured, draft: str) -> EvalReport:
    return make_report(found, None, EvalConfig(target="t"), draft=draft, took_turns=False)


def test_drafts_are_compared_on_the_prompts_that_none_of_them_makes_repeat() -> None:
    count = 20
    slow = report_of(measured([40] * count, [20] * count, 50.0), "slow")
    fast = report_of(measured([40] * count, [10 + i % 2 for i in range(count)], 90.0, 3), "fast")
    near = report_of(measured([40] * count, [20 + i % 2 - (i + 1) % 2 for i in range(count)], 51.0), "near")
    first, second, third = compare([slow, fast, near])
    assert (first.prompts, first.acceptance_length, first.difference, first.interval) == (19, 2.0, 0.0, (0.0, 0.0))
    assert second.acceptance_length == pytest.approx(40 * 19 / (19 * 10 + 9))  # without prompt 3, for all
    assert second.interval[0] > 1.5
    assert second.interval[0] < second.difference < second.interval[1]
    assert second.distinct
    assert (second.repeating, second.tokens_per_s) == (1, 90.0)
    assert not third.distinct
    other = report_of(measured([40], [20], 1.0), "other")
    with pytest.raises(ConfigError, match="different prompts"):
        compare([slow, other])
    with pytest.raises(ConfigError, match="no prompt is left"):
        compare([report_of(measured([40], [20], 1.0, 0), "x")] * 2)


def words(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, however wide the terminal."""
    return " ".join(capsys.readouterr().out.split())


def test_the_command_measures_each_draft_and_compares(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With answers made by hand in place of the server; the second draft's server does not start."""
    from eagle3_data.cli import main
    from eagle3_data.train import evaluate

    def call(*arguments: str) -> object:
        monkeypatch.setattr("sys.argv", ["eagle3-data", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0

    file, out = tmp_path / "p.jsonl", tmp_path / "report.json"
    file.write_text("".join(json.dumps({"prompt": f"hello {i}"}) + "\n" for i in range(6)))

    def measure(draft: Path, prompts: object, config: EvalConfig, **_: object) -> object:
        seen.append(config.server_args)
        if draft.name == "broken":
            raise ConfigError("the server does not start")
        checks = 20 if draft.name == "one" else 10
        return report_of(measured([40] * 6, [checks] * 6, 50.0, 5), draft.name)

    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(evaluate, "evaluate_draft", measure)
    common = ["evaluate", "--target", str(tiny_llama), "--prompts", str(file), "--out", str(out)]
    assert call(*common, "--draft", "one", "--draft", "two") == 0
    shown = capsys.readouterr().out
    assert "2 drafts on 5 prompts without repeating answers" in shown
    assert shown.index("two", shown.index("2 drafts")) < shown.index("one", shown.index("2 drafts"))
    assert [report["draft"] for report in json.loads(out.read_text())] == ["one", "two"]
    assert call(*common, "--draft", "two", "--draft", "broken") == 1
    assert [report["draft"] for report in json.loads(out.read_text())] == ["two"]  # what was measured is kept
    assert call(*common, "--draft", "one", "--trust-remote-code", "--", "--quantization", "fp8") == 0
    assert seen[-1] == ("--trust-remote-code", "--quantization", "fp8")
    assert call(*common, "--draft", "one", "--url", "http://127.0.0.1:1", "--", "--quantization", "fp8") == 1
    assert "--quantization is for a server" in capsys.readouterr().err
    assert call(*common, "--draft", "one", "--draft", "two", "--url", "http://127.0.0.1:1") == 1
    assert "one server with one draft" in capsys.readouterr().err
    assert call(*common, "--draft", "one", "--baseline", "--url", "http://127.0.0.1:1") == 1
    assert "--baseline-url" in capsys.readouterr().err  # it had been left out without a word
    assert call(*common, "--draft", "one", "--baseline-url", "http://127.0.0.1:1") == 1
    assert "goes with --url" in capsys.readouterr().err
    both = ("--url", "http://127.0.0.1:1", "--baseline-url")
    assert call(*common, "--draft", "one", *both, "http://127.0.0.1:1/") == 1
    assert "are one server" in capsys.readouterr().err

    def beside(url: str, plain_url: str, prompts: list[EvalPrompt], config: EvalConfig, **_: object) -> object:
        assert (url, plain_url, len(prompts)) == ("http://127.0.0.1:1", "http://127.0.0.1:2", 6)
        found, plain = measured([40] * 6, [20] * 6, 50.0), measured([40] * 6, [0] * 6, 40.0)
        found.rates.extend([60.0, 40.0][: config.rounds - 1])
        plain.rates.extend([40.0, 40.0][: config.rounds - 1])
        return make_report(found, plain, config, draft="one", took_turns=True)

    monkeypatch.setattr(evaluate, "evaluate_beside", beside)
    assert call(*common, "--draft", "one", *both, "http://127.0.0.1:2") == 0
    assert "50.0 tok/s with the draft at 8 in flight, 40.0 without: 1.25x (one round" in words(capsys)
    assert call(*common, "--draft", "one", *both, "http://127.0.0.1:2", "--rounds", "3") == 0
    shown = words(capsys)
    assert "50.0 tok/s (40.0 to 60.0 over 3 rounds) with the draft" in shown
    assert "40.0 without: 1.25x (1.00 to 1.50); 6 of 6 greedy answers equal" in shown
