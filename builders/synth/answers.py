"""The answers file: one JSON line per answer, appended; a resume reads which rows are there and mends a torn end."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from eagle3_data.builders.samples.messages import Conversation, Message
from eagle3_data.builders.synth.dialogue import Answer
from eagle3_data.builders.synth.spec import SynthSpec
from eagle3_data.errors import InputError, ManifestMismatch

SYNC_ROWS = 16
"""Rows between two fsyncs: what a power cut can cost."""


def record_path(path: Path) -> Path:
    return path.with_suffix(".synth.json")


def errors_path(path: Path) -> Path:
    return path.with_suffix(".errors.jsonl")


class AnswerFile:
    """Append-only. All lines of one row are written at once; a row counts when all of them are there."""

    def __init__(self, path: Path, spec: SynthSpec) -> None:
        self.path, self.spec = path, spec
        path.parent.mkdir(parents=True, exist_ok=True)
        self._check_record()
        self.done = self._mend() if path.exists() else set()
        """Rows that have their answers already."""
        self._file: IO[bytes] = path.open("ab")
        self._errors: IO[str] = errors_path(path).open("w", encoding="utf-8")
        self._unsynced = 0

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._sync()
        self._file.close()
        self._errors.close()

    def save(self, conversation: Conversation, answers: list[Answer]) -> None:
        """Append the answers of one row."""
        lines = [_line(conversation, answer, len(answers), self.spec) for answer in answers]
        self._file.write(b"".join(lines))
        self._unsynced += 1
        if self._unsynced >= SYNC_ROWS:
            self._sync()

    def fail(self, row: int, row_id: str, reason: str, detail: str, attempts: int) -> None:
        """Put a row that has no answer into the ledger of errors; the next run asks for it again."""
        record = {"row": row, "id": row_id, "reason": reason, "detail": detail, "attempts": attempts}
        self._errors.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._errors.flush()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._unsynced = 0

    def _check_record(self) -> None:
        """Refuse to mix answers of two specs; names the field."""
        record, now = record_path(self.path), self.spec.to_dict()
        if self.path.exists() and self.path.stat().st_size:
            try:
                before = json.loads(record.read_text(encoding="utf-8"))
            except FileNotFoundError as error:
                raise ManifestMismatch(
                    f"{self.path} exists without {record.name}: it is not an answers file of ours",
                    next="name another --out",
                ) from error
            for name, value in now.items():
                if before.get(name) != value:
                    raise ManifestMismatch(
                        f"{self.path} was begun with {name} {before.get(name)!r}, asked for is {value!r}",
                        next="use the same settings to resume, or name another --out",
                    )
            return
        hidden = record.with_name(f".{record.name}.tmp")
        hidden.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
        os.rename(hidden, record)

    def _mend(self) -> set[int]:
        """Rows that are whole; a torn line, and a last row whose lines are not all there, are cut off."""
        done: set[int] = set()
        position = whole = lines = 0
        row = None
        with self.path.open("rb+") as file:
            for number, line in enumerate(file, 1):
                position += len(line)
                if not line.endswith(b"\n"):
                    break
                try:
                    value = json.loads(line)
                    this, wanted = int(value["row"]), int(value["rows"])
                except (ValueError, KeyError, TypeError) as error:
                    raise InputError(f"{self.path}:{number}: not a line of an answers file ({error})") from error
                lines = lines + 1 if this == row else 1
                row = this
                if lines == wanted:
                    done.add(this)
                    whole, row = position, None
            if whole < position:
                file.truncate(whole)
        return done


def _line(conversation: Conversation, answer: Answer, rows: int, spec: SynthSpec) -> bytes:
    value: dict[str, Any] = {
        "row": conversation.row,
        "rows": rows,
        "id": conversation.id,
        "turn": answer.turn,
        "source": conversation.source,
        "messages": [_message(message) for message in answer.messages],
        "input_ids": answer.input_ids,
        "loss_mask": answer.loss_mask,
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
        "finish_reason": answer.finish_reason,
        "sampling": spec.sampling(conversation.row).to_params(),
    }
    if conversation.tools:
        value["tools"] = list(conversation.tools)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _message(message: Message) -> Mapping[str, Any]:
    return message.to_dict(reasoning_field="reasoning_content", arguments="dict", parts=True)
