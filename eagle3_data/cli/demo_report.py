"""The demo's last word: one table on the terminal, and a page to look at."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from eagle3_data import durable
from eagle3_data.cli.progress import answer, console
from eagle3_data.status import format_bytes, format_duration

if TYPE_CHECKING:
    from eagle3_data.builders.settings import BuildReport
    from eagle3_data.cli.demo import Folders

WIDTH, HEIGHT, MARGIN = 640, 220, 40


@dataclass(frozen=True, slots=True)
class Summary:
    """Name -> what was measured, ready to print; `losses` [(step, loss)]."""

    rows: dict[str, str]
    losses: list[tuple[int, float]]

    @classmethod
    def of(
        cls, folders: Folders, build: BuildReport, training: dict[str, Any], evaluation: dict[str, Any], seconds: float
    ) -> Summary:
        overall = evaluation["overall"]
        rows = {
            "samples": f"{build.saved:,} saved of {build.planned:,} planned",
            "tokens": f"{build.tokens:,}",
            "capture speed": f"{build.tokens_per_s:,.0f} tok/s",
            "errors": f"{sum(build.failed.values())} failed, {sum(build.retried.values())} retried",
            "bytes": f"{build.nbytes:,} ({format_bytes(build.nbytes)})",
            "bytes/token": f"{build.nbytes / build.tokens:,.0f}",
            "loss": f"{training['first_loss']:.3f} -> {training['last_loss']:.3f} in {training['steps']:,} steps",
            "acceptance length": f"{overall['acceptance_length']:.2f} in the real server (1.00: a useless draft), "
            f"{training['simulated_acceptance']:.2f} simulated in training",
            "greedy answers": f"{evaluation['equal_answers']} of {overall['answers']} equal with and without the draft",
            "decoding": f"{evaluation['tokens_per_s']:,.0f} tok/s with the draft, "
            f"{evaluation['plain_tokens_per_s']:,.0f} without ({evaluation['speedup']:.2f}x)",
            "target": str(folders.out / "model"),
            "shards": str(folders.data),
            "draft": str(folders.draft),
            "report": str(folders.out / "report.html"),
            "time": format_duration(seconds),
        }
        return cls(rows, read_losses(folders.run / "metrics.jsonl"))


def read_losses(path: Path) -> list[tuple[int, float]]:
    """(step, loss) of every logged training step."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        if "step" in row and "loss" in row:
            found.append((int(row["step"]), float(row["loss"])))
    return found


def show(summary: Summary) -> None:
    console.rule("[bold]7/7[/bold] what came out", align="left")
    table = Table(show_header=False, box=None)
    for name, value in summary.rows.items():
        table.add_row(name, value)
    answer.print(table, highlight=False)


def write_report(folders: Folders, summary: Summary) -> None:
    """`report.html`, self-contained, and `report.json`."""
    durable.write_text(folders.out / "report.json", json.dumps(summary.rows, indent=1) + "\n")
    rows = "\n".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in summary.rows.items())
    durable.write_text(folders.out / "report.html", PAGE.format(rows=rows, curve=curve(summary.losses)))


def curve(losses: list[tuple[int, float]]) -> str:
    """The training loss as an SVG line."""
    if len(losses) < 2:
        return ""
    steps, values = [step for step, _ in losses], [loss for _, loss in losses]
    span, low, high = max(steps) - min(steps) or 1, min(values), max(values)
    rise = (high - low) or 1.0

    def at(step: int, loss: float) -> str:
        x = MARGIN + (step - min(steps)) / span * (WIDTH - 2 * MARGIN)
        y = HEIGHT - MARGIN - (loss - low) / rise * (HEIGHT - 2 * MARGIN)
        return f"{x:.1f},{y:.1f}"

    points = " ".join(at(step, loss) for step, loss in losses)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="training loss">'
        f'<polyline points="{points}" fill="none" stroke="#2563eb" stroke-width="2"/>'
        f'<text x="4" y="{MARGIN}">{high:.2f}</text><text x="4" y="{HEIGHT - MARGIN}">{low:.2f}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 12}" text-anchor="end">step {max(steps):,}</text></svg>'
    )


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>eagle3-data demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 2rem auto; padding: 0 1rem; color: #1f2937 }}
th {{ text-align: left; padding-right: 1.5rem; vertical-align: top; white-space: nowrap }}
td {{ overflow-wrap: anywhere }} svg text {{ font-size: 12px; fill: #6b7280 }}
</style>
<h1>eagle3-data demo</h1>
<p>SmolLM2-135M-Instruct answered prompts, its hidden states were captured from a patched SGLang server and sealed in
shards, an EAGLE-3 draft was trained on them, and the real server decoded held-out prompts with it.</p>
<table>
{rows}
</table>
<h2>Training loss</h2>
{curve}
</html>
"""
