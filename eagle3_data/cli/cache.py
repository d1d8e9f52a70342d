"""The two options of every command that reads samples of a mirror: where whole shards are kept, and how many bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from eagle3_data.shards.cache import FOLDER_VARIABLE, SIZE_VARIABLE

ShardCache = Annotated[
    Optional[Path],  # noqa: UP045 - typer evaluates annotations on Python 3.10
    typer.Option("--shard-cache", "--cache-dir", envvar=FOLDER_VARIABLE, help="Keep shards of mirrors in this folder."),
]
ShardCacheSize = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(envvar=SIZE_VARIABLE, help="At most so much there, e.g. 500GB; oldest use out first. [100GB]"),
]
