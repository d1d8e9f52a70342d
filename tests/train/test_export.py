"""Exports: what the engines read, in their own conventions, and what the linter rejects (C28, C30, C33)."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3_data.errors import ConfigError, TrainingError
from eagle3_data.protocol import default_aux_layers
from eagle3_data.train.checkpoint import DRAFT, read_draft, write_checkpoint
from eagle3_data.train.engines import Engine, captured_by, engine_layers
from eagle3_data.train.export import export_draft, layer_config, lint_folder, sglang_config, vllm_config
from eagle3_data.train.lint import Finding, errors_of, expected_shapes, lint
from eagle3_data.train.rope import RopeSpec
from eagle3_data.train.spec import DraftSpec
from eagle3_data.train.vocab import VocabMap
from tests.train.reference import make_draft

YARN = RopeSpec(theta=50000.0, kind="yarn", factor=64.0, original_positions=4096, mscale=1.0, mscale_all_dim=1.0)


def checkpoint(folder: Path, **changes: object) -> DraftSpec:
    draft = make_draft(**changes)
    spec = draft.spec
    tensors = {name: parameter.detach() for name, parameter in draft.named_parameters()}
    if spec.reduced_vocab:
        vocab = VocabMap(torch.arange(spec.draft_vocab_size) * 2, spec.vocab_size, 1.0, 0, 0)
        tensors |= {"d2t": vocab.d2t, "t2d": vocab.t2d}
    write_checkpoint(folder, spec, None, {DRAFT: tensors})
    return spec


def config_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return loaded


def test_reduced_vocabulary_carries_offset_map_and_mask(tmp_path: Path) -> None:
    """C28"""
    checkpoint(tmp_path / "c")
    export_draft(tmp_path / "c", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    ids = torch.arange(40) + tensors["d2t"]
    assert ids.tolist() == tensors["t2d"].nonzero().flatten().tolist()
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    assert "embed_tokens.weight" not in tensors  # SGLang shares the target's


def test_equal_vocabulary_carries_neither(tmp_path: Path) -> None:
    """C28"""
    checkpoint(tmp_path / "c", draft_vocab_size=96)
    export_draft(tmp_path / "c", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert not {"d2t", "t2d"} & set(tensors)
    assert config_of(tmp_path / "out")["draft_vocab_size"] == 96


def test_position_limit_and_rope_follow_the_target(tmp_path: Path) -> None:
    """C30: trained at 2,048 tokens, the target goes to 40,960."""
    checkpoint(tmp_path / "c", max_positions=40960, trained_tokens=2048, rope=YARN)
    result = export_draft(tmp_path / "c", tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert config["max_position_embeddings"] == 40960
    assert config["rope_scaling"]["factor"] == 64.0
    assert config["rope_theta"] == 50000.0
    (warning,) = result.warnings
    assert "2048" in str(warning)
    assert "40960" in str(warning)
    config["max_position_embeddings"] = 2048
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    findings = lint_folder(tmp_path / "out", read_draft(tmp_path / "c").spec, "sglang")
    assert any(f.field == "max_position_embeddings" and f.value == 2048 and "40960" in f.expected for f in findings)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("num_hidden_layers", 48, "1"),
        ("architectures", ["LlamaForCausalLM"], "LlamaForCausalLMEagle3"),
        ("architectures", ["Qwen3ForCausalLMEagle3"], "LlamaForCausalLMEagle3"),
        ("draft_vocab_size", 96, "40"),
        ("vocab_size", 40, "96"),
        ("head_dim", 12, "16"),
        ("rope_theta", 500.0, "10000.0"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}, "default"),
        ("norm_output", True, "False"),
        ("quantization_config", {"bits": 4}, "none"),
        ("hidden_act", "gelu", "silu"),
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, "[1, 3, 4]"),
        ("eagle_config", {}, "list of layer ids"),
        ("tie_word_embeddings", True, "False"),
    ],
)
def test_linter_names_field_value_and_expected(tmp_path: Path, field: str, value: object, expected: str) -> None:
    """C33"""
    spec = checkpoint(tmp_path / "c")
    export_draft(tmp_path / "c", tmp_path / "out")
    config = config_of(tmp_path / "out")
    config[field] = value
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    errors = errors_of(lint_folder(tmp_path / "out", spec, "sglang"))
    assert errors
    text = "\n".join(map(str, errors))
    assert expected in text
    assert field in text or "eagle_aux" in text
    shown = (
        value["eagle_aux_hidden_state_layer_ids"] if isinstance(value, dict) and "eagle_aux" in str(value) else value
    )
    assert str(shown) in text or isinstance(value, dict)


def test_linter_rejects_wrong_tensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    spec = checkpoint(tmp_path / "c")
    export_draft(tmp_path / "c", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)

    def errors(**changes: torch.Tensor | None) -> list[Finding]:
        changed = {**tensors, **{name.replace("__", "."): t for name, t in changes.items()}}
        save_file({name: t for name, t in changed.items() if t is not None}, path)
        return errors_of(lint_folder(tmp_path / "out", spec, "sglang"))

    assert errors() == []
    assert [f.field for f in errors(d2t=torch.arange(40) * 2)] == ["d2t"]  # absolute ids instead of offsets
    assert [f.field for f in errors(fc__weight=torch.zeros(48, 48))] == ["fc.weight"]
    assert [f.field for f in errors(norm__weight=None)] == ["norm.weight"]
    assert [f.field for f in errors(t2d=None)] == ["t2d"]


def test_layer_ids_in_each_engines_convention() -> None:
    llama, kimi = "LlamaForCausalLM", "KimiK25ForConditionalGeneration"
    assert engine_layers("sglang", (1, 29, 57), llama) == [1, 29, 57]
    assert engine_layers("sglang", (1, 29, 57), kimi) == [1, 29, 57]
    assert engine_layers("sglang", (2, 29, 57), kimi) == [3, 30, 58]  # its class adds 1 only when the first id is 1
    assert engine_layers("vllm", (1, 29, 57), kimi) == [2, 30, 58]
    assert captured_by("sglang", [0, 29, 57], kimi) == (-1, 28, 56)  # the trap, as measured
    with pytest.raises(TrainingError, match="first is not 0"):
        engine_layers("sglang", (0, 29, 57), kimi)
    assert engine_layers("sglang", (0, 29, 57), llama) == [0, 29, 57]


def test_one_aux_layer_is_rejected_for_sglang(tmp_path: Path) -> None:
    """SGLang applies fc only when the aux states are wider than the draft; with one layer it would skip it silently."""
    checkpoint(tmp_path / "c", aux_layers=(3,))
    with pytest.raises(TrainingError, match="at least two layers"):
        export_draft(tmp_path / "c", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_switches_reach_both_engines(tmp_path: Path) -> None:
    spec = checkpoint(tmp_path / "c", fc_norm=True, norm_output=True)
    config = sglang_config(spec, "bfloat16")
    assert (config["fc_norm"], config["norm_output"]) == (True, True)
    tensors = load_file(export_draft(tmp_path / "c", tmp_path / "out").folder / "model.safetensors")
    assert tensors["fc_norm.2.weight"].shape == (48,)


def test_a_norm_that_older_servers_ignore(tmp_path: Path) -> None:
    checkpoint(tmp_path / "c", norm_before_fc=True)
    with pytest.raises(TrainingError, match=r"norm_before_fc is 'True on 0\.5\.14'"):
        export_draft(tmp_path / "c", tmp_path / "out", version="0.5.14")
    assert export_draft(tmp_path / "c", tmp_path / "out", version="0.5.23").warnings == []
    assert [w.field for w in export_draft(tmp_path / "c", tmp_path / "out").warnings] == ["norm_before_fc"]


@pytest.mark.parametrize(
    ("engine", "switch", "version", "level"),
    [
        ("sglang", "norm_before_fc", "0.5.22", "error"),
        ("sglang", "norm_before_fc", "0.5.23.post1", None),
        ("sglang", "norm_before_fc", None, "warning"),
        ("sglang", "fc_norm", "0.5.14", None),
        ("sglang", "fc_norm", "0.5.9", "error"),
        ("sglang", "fc_norm", None, None),
        ("vllm", "fc_norm", "0.21.0", "error"),
        ("vllm", "fc_norm", "v0.22.0", None),
        ("vllm", "norm_output", None, "warning"),
        ("vllm", "norm_before_fc", "0.19.1", "error"),
    ],
)
def test_what_only_some_versions_of_an_engine_load(
    tmp_path: Path, engine: Engine, switch: str, version: str | None, level: str | None
) -> None:
    spec = checkpoint(tmp_path / "c", **{switch: True})
    config = sglang_config(spec, "bfloat16")
    if engine == "vllm":
        config = vllm_config(spec, "bfloat16", target="t", draft_tokens=3)
    shapes = {name: (torch.bfloat16, shape) for name, shape in expected_shapes(spec, engine).items()}
    maps = {"d2t": (torch.int64, (40,)), "t2d": (torch.bool, (96,))}
    findings = lint(config, {**shapes, **maps}, spec, engine, version=version)
    assert [(f.level, f.field) for f in findings] == ([(level, switch)] if level else [])


def test_a_quantised_target_with_latent_attention(tmp_path: Path) -> None:
    """Kimi-K2.5: the printed command keeps the target's attention backend and quantisation away from the draft."""
    kimi = {
        "latent_attention": True,
        "target_quantised": True,
        "target_architecture": "KimiK25ForConditionalGeneration",
    }
    checkpoint(tmp_path / "c", **kimi)
    result = export_draft(tmp_path / "c", tmp_path / "out")
    assert "--speculative-draft-attention-backend fa3" in result.command
    assert "--speculative-draft-model-quantization unquant" in result.command
    assert [warning.field for warning in result.warnings] == ["attention backend", "quantization"]
    checkpoint(tmp_path / "plain")
    plain = export_draft(tmp_path / "plain", tmp_path / "out")
    assert "attention-backend" not in plain.command
    assert "quantization" not in plain.command


def test_vllm_export(tmp_path: Path, tiny_llama: Path) -> None:
    """Names and fields of speculators' Eagle3Speculator; the embedding comes from the target's checkpoint."""
    shape = {"hidden_size": 64, "vocab_size": 768, "head_dim": 16, "target_model": str(tiny_llama)}
    checkpoint(tmp_path / "c", **shape)
    result = export_draft(tmp_path / "c", tmp_path / "out", engine="vllm", draft_tokens=5)
    config, tensors = config_of(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # inputs, where SGLang takes outputs
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["transformer_layer_config"]["num_hidden_layers"] == 1
    assert "layers.0.self_attn.q_proj.weight" in tensors
    assert not any(name.startswith("midlayer.") for name in tensors)
    embedding = load_file(tiny_llama / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(tensors["embed_tokens.weight"], embedding.bfloat16())
    assert "vllm serve" in result.command


def test_round_trip_and_replacement(tmp_path: Path) -> None:
    spec = checkpoint(tmp_path / "c")
    for _ in range(2):  # an older export of ours is replaced, anything else is not touched
        export_draft(tmp_path / "c", tmp_path / "out", dtype="float32")
    saved, tensors = read_draft(tmp_path / "c"), load_file(tmp_path / "out" / "model.safetensors")
    assert saved.spec == spec
    assert set(tensors) == set(saved.tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, saved.tensors[name]), name
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    (tmp_path / "out" / "notes").write_text("x")  # beside the export
    for folder in ("mine", "out"):
        with pytest.raises(ConfigError, match="not an exported draft alone"):
            export_draft(tmp_path / "c", tmp_path / folder)
        assert (tmp_path / folder / "notes").exists()


def test_a_model_is_not_taken_for_an_older_export(tmp_path: Path, tiny_llama: Path) -> None:
    """A target's folder has a config.json and a model.safetensors, too; it had been emptied."""
    checkpoint(tmp_path / "c")
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_llama / name, model)
    with pytest.raises(ConfigError, match="not an exported draft alone"):
        export_draft(tmp_path / "c", model)
    assert config_of(model)["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_another_projects_draft_is_not_taken_for_an_older_export(
    tmp_path: Path, tiny_llama: Path, engine: Engine
) -> None:
    """It has the same architecture, and the same files but for one; it had been replaced."""
    checkpoint(tmp_path / "c", hidden_size=64, vocab_size=768, head_dim=16, target_model=str(tiny_llama))
    out = export_draft(tmp_path / "c", tmp_path / "out", engine=engine).folder
    export_draft(tmp_path / "c", out, engine=engine)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(out / name, theirs)
    (theirs / "model.safetensors").write_bytes(b"their weights")
    with pytest.raises(ConfigError, match="not an exported draft alone"):
        export_draft(tmp_path / "c", theirs, engine=engine)
    assert (theirs / "model.safetensors").read_bytes() == b"their weights"


def test_the_embedding_is_the_training_targets_and_the_name_the_servings(tmp_path: Path, tiny_llama: Path) -> None:
    shape = {"hidden_size": 64, "vocab_size": 768, "head_dim": 16}
    checkpoint(tmp_path / "c", **shape, target_model=str(tiny_llama))
    there = "/where/it/is/served"
    result = export_draft(tmp_path / "c", tmp_path / "out", engine="vllm", target=there)
    assert config_of(result.folder)["speculators_config"]["verifier"]["name_or_path"] == there
    assert there in result.command
    checkpoint(tmp_path / "moved", **shape, target_model=str(tmp_path / "gone"))
    export_draft(tmp_path / "moved", tmp_path / "out", engine="vllm", target=str(tiny_llama))
    with pytest.raises(ConfigError):
        export_draft(tmp_path / "moved", tmp_path / "out", engine="vllm")


def test_transformers_reads_the_layer_config() -> None:
    from transformers import LlamaConfig

    spec = replace(make_draft().spec, rope=YARN, max_positions=262144)
    config = LlamaConfig.from_dict(layer_config(spec, "bfloat16"))
    assert config.head_dim == 16
    assert config.num_hidden_layers == 1
    rope = getattr(config, "rope_parameters", None) or {**config.rope_scaling, "rope_theta": config.rope_theta}
    assert (rope["rope_theta"], rope["factor"], rope["rope_type"]) == (50000.0, 64.0, "yarn")


def test_a_qwen3_draft_asks_for_the_layers_that_were_captured(tmp_path: Path) -> None:
    """C10: 36 layers, default aux layers. The captured half is tests/server/test_builds.py, on the real server."""
    layers = default_aux_layers(36)
    assert layers == (1, 17, 32)
    checkpoint(tmp_path / "c", aux_layers=layers, target_layers=36, target_architecture="Qwen3ForCausalLM")
    export_draft(tmp_path / "c", tmp_path / "out")
    ids = config_of(tmp_path / "out")["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert captured_by("sglang", ids, "Qwen3ForCausalLM") == layers
    assert captured_by("vllm", engine_layers("vllm", layers, "Qwen3ForCausalLM"), "Qwen3ForCausalLM") == layers
