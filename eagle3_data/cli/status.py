"""`eagle3-data status`."""

from __future__ import annotations

from typing import Annotated

import typer

from eagle3_data.cli.status_view import show_status


def status_command(
    where: Annotated[str, typer.Argument(help="Folder of a build, or its mirror: hf://datasets/ORG/NAME, s3://...")],
    watch: Annotated[bool, typer.Option("--watch", help="Live view until the build ends or Ctrl-C.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="One log line per 10 seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable, one object.")] = False,
) -> None:
    """How far a build is, how fast, and whether it is alive. Exit code 2 FAILED, 3 DEAD, 4 STALLED, else 0.

    Example: eagle3-data status kimi-data --watch
    """
    show_status(where, watch=watch, follow=follow, as_json=as_json)
