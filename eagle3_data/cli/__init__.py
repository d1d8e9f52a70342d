"""`eagle3-data`: one command per stage of the data's way. Each module beside this one holds one group of commands."""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import Any

from eagle3_data import __version__

COMMANDS = {
    "serve": ("serve", "serve_command", "Start SGLang with capture and show what is hooked."),
    "doctor": ("serve", "doctor_command", "Check a running server, with a canary capture."),
    "samples": ("samples", "samples_command", "Conversations to token ids and loss masks; look at them."),
    "synth": ("samples", "synth_command", "Have the target itself answer prompts."),
    "plan": ("plan", "plan_command", "What a build will take, and whether it fits."),
    "build": ("build", "build_command", "Capture conversations into sealed shards."),
    "retry": ("build", "retry_command", "Try the failed samples of a build again."),
    "merge": ("merge", "merge_command", "Join the parts of a build made with --shards."),
    "status": ("status", "status_command", "How far, how fast, alive or not."),
    "verify": ("verify", "verify_command", "Check every byte of a build."),
    "push": ("mirror", "push_command", "Send sealed shards to a hub or any URL."),
    "pull": ("mirror", "pull_command", "Fetch a mirror, checksums verified."),
    "train": ("train", "train_command", "Train an EAGLE-3 draft on a build."),
    "export": ("train", "export_command", "Write a draft for SGLang or vLLM, samples for other trainers."),
    "import": ("exchange", "import_command", "Take over drafts and states of SpecForge and speculators."),
    "evaluate": ("evaluate", "evaluate_command", "Acceptance length in the real server."),
    "demo": ("demo", "demo_command", "The whole way in ten minutes on a CPU."),
}
"""Command -> (module of this package, function, summary), in the order of the data's way."""

ABOUT = """Make, keep and use EAGLE-3 training data.

\b
    eagle3-data serve --model M                      a patched SGLang server
    eagle3-data build conversations.jsonl --model M --server http://HOST:30000 --out DIR
    eagle3-data status DIR                           how far, how fast, alive or not
    eagle3-data train --data DIR --target M --out RUN
    eagle3-data evaluate --draft RUN/export --target M

Each command has an example: eagle3-data COMMAND --help
"""


def make_app(command: str | None) -> Any:
    """The typer application. Only the module of `command` is imported: `status` must not wait for torch."""
    import typer

    app = typer.Typer(
        name="eagle3-data",
        help=ABOUT,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    def version(value: bool) -> None:
        if value:
            print(f"eagle3-data {__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        version: bool = typer.Option(False, "--version", callback=version, is_eager=True, help="Print the version."),
    ) -> None:
        pass

    for name, (module, function, summary) in COMMANDS.items():
        if name == command:
            settings = {"allow_extra_args": True} if name in ("serve", "evaluate") else {}
            found = getattr(importlib.import_module(f"eagle3_data.cli.{module}"), function)
            app.command(name, context_settings=settings)(found)
        else:
            app.command(name, help=summary)(_elsewhere)
    return app


def _elsewhere() -> None:
    """Stands in the overview for a command whose module is not needed now."""


def main() -> None:
    """Entry point. Errors of ours are one message and exit code 1, Ctrl-C is 130; tracebacks are for our own slips.

    Nothing that looks like a token is printed, whatever a library put into its message.
    """
    from eagle3_data.errors import Eagle3Error
    from eagle3_data.hub.redact import redact

    command = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    try:
        match sys.argv[1:]:
            case ["status", where] if not where.startswith("-"):
                # asked again and again: typer alone would take half of the answer's time to read one argument
                from eagle3_data.cli.status_view import show_status

                show_status(where)
            case _:
                make_app(command)()
    except Eagle3Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception:
        print(redact(traceback.format_exc()), file=sys.stderr)
        sys.exit(1)
