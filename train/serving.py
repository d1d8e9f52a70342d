"""What an exported draft's config.json cannot say: `serving.json` beside it, for our own commands; engines ignore it.

It also tells an export of ours from another project's, which has the same files otherwise.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from eagle3_data.errors import ConfigError
from eagle3_data.train.engines import Engine, draft_arguments
from eagle3_data.train.spec import DraftSpec

SERVING = "serving.json"


@dataclass(frozen=True, slots=True)
class Serving:
    sglang_args: tuple[str, ...] = ()
    """`engines.draft_arguments`; none for another engine."""
    sliding_window_tokens: int | None = None

    @classmethod
    def of(cls, spec: DraftSpec, engine: Engine) -> Serving:
        arguments = draft_arguments(spec) if engine == "sglang" else []
        return cls(tuple(arguments), spec.sliding_window_tokens)

    @classmethod
    def read(cls, draft: Path) -> Serving:
        """Of an exported draft; what any draft has for one that is not of ours. Raises ConfigError when damaged."""
        try:
            found = json.loads((draft / SERVING).read_text())
            window = found["sliding_window_tokens"]
            return cls(tuple(map(str, found["sglang_args"])), None if window is None else int(window))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{draft / SERVING} cannot be read: {error}", next="export the draft again") from error

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"
