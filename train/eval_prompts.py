"""Prompts for an evaluation, as token ids: rendered with the chat template, or the held-out share of a build."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_data.errors import ConfigError, InputError
from eagle3_data.protocol import IDS, MASK
from eagle3_data.train.alignment import answer_spans
from eagle3_data.train.loader import Samples


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    id: str
    category: str
    input_ids: tuple[int, ...]


def read_prompts(path: Path, target: str, *, trust_remote_code: bool, limit: int | None) -> list[EvalPrompt]:
    """JSONL lines with `prompt` (text) or `messages`, and optionally `id` and `category` (or `source`).

    Raises InputError naming file and line.
    """
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() would also cut at U+2028 inside a text
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        except (ValueError, KeyError, AttributeError) as error:
            raise InputError(
                f"{path}:{number}: not a prompt ({type(error).__name__}: {error})",
                next='one JSON object per line: {"prompt": "..."} or {"messages": [...]}',
            ) from None
        rows.append((str(row.get("id", number)), str(row.get("category") or row.get("source") or "all"), messages))
    if not rows:
        raise InputError(f"{path} has no prompts")
    rows = rows[:limit]
    tokenizer = _tokenizer(target, trust_remote_code)
    return [EvalPrompt(id, category, _render(tokenizer, messages, target)) for id, category, messages in rows]


def _tokenizer(target: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(target, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the tokenizer of {target}: {error}") from None


def _render(tokenizer: Any, messages: list[dict[str, Any]], target: str) -> tuple[int, ...]:
    if not tokenizer.chat_template:
        raise ConfigError(f"{target} has no chat template", next="use prompts from a build (--data)")
    # text first: transformers 4 and 5 return different types when asked for tokens
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def heldout_prompts(data: Samples, samples: Sequence[int], *, limit: int | None) -> list[EvalPrompt]:
    """The prompt of each sample: its tokens up to the first answer. No more samples than needed are read."""
    prompts: list[EvalPrompt] = []
    for sample in samples:
        if limit is not None and len(prompts) >= limit:
            break
        read = data.read(sample, (IDS, MASK))
        spans = answer_spans(read[MASK])
        if spans and spans[0][0] > 0:
            ids = tuple(read[IDS][: spans[0][0]].tolist())
            prompts.append(EvalPrompt(data.keys[sample], "held out", ids))
    if not prompts:
        raise ConfigError("no held-out sample has a prompt and an answer")
    return prompts
