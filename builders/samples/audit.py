"""One HTML page about a set of samples: counts, drops, lengths, and examples with what is learnt marked. No network."""

from __future__ import annotations

import html
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from eagle3_data.builders.samples.encode import Encoder
from eagle3_data.builders.samples.show import headline, runs
from eagle3_data.builders.samples.store import SampleStore, drops_path

BINS = 40
SHOWN_DROPS = 5
"""Examples of dropped rows for each reason."""
SHOWN_CHARS = 20_000
"""Of one example; the middle of a longer run is left out."""

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #666; --line: #ddd; --page: #fff; --learnt: #c9efd2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --soft: #999; --line: #3a3a3a; --page: #161616; --learnt: #1f4d2c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } .soft { color: var(--soft); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: 6px; padding: .8rem;
  color: var(--soft); font-size: 13px; } mark { background: var(--learnt); color: var(--ink); border-radius: 3px; }
svg { width: 100%; height: 10rem; } rect { fill: #3b7dd8; } text { fill: var(--soft); font-size: 11px; }
"""


def write_audit(store: SampleStore, encoder: Encoder, out: str | Path, *, examples: int = 12) -> None:
    """Write the page, whole or not at all."""
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    hidden = out.with_name(f".{out.name}.tmp")
    hidden.write_text(page(store, encoder, examples=examples), encoding="utf-8")
    os.replace(hidden, out)


def page(store: SampleStore, encoder: Encoder, *, examples: int) -> str:
    """The page's HTML. Examples are spread over all lengths."""
    report = store.report
    supervised = np.concatenate([[sample.supervised] for sample in store]) if len(store) else np.zeros(0)
    shares = supervised / np.maximum(store.tokens, 1)
    counts = {
        "rows read": f"{report.rows:,}",
        "samples": f"{report.samples:,}",
        "tokens": f"{report.tokens:,}",
        "learnt tokens": f"{report.supervised:,} ({report.supervised_share:.1%})",
        "tokens per sample": quantiles(store.tokens),
        "learnt share per sample": quantiles(shares, percent=True),
        "input": f"{', '.join(report.inputs)} ({report.form})",
        "digest": store.digest,
    }
    order = np.argsort(store.tokens, kind="stable")
    picked = sorted({int(order[at]) for at in np.linspace(0, len(order) - 1, min(examples, len(order))).astype(int)})
    sections = [
        f"<h1>Samples of {esc(store.path.name)}</h1>",
        table(counts),
        "<h2>Dropped</h2>" + drops_table(report.dropped, drops_path(store.path)),
        "<h2>On the way</h2>" + (table({k: f"{v:,}" for k, v in report.notes.items()}) or "<p>nothing to note</p>"),
        "<h2>Tokens per sample</h2>" + histogram(store.tokens),
        "<h2>Settings</h2>" + table({name: json.dumps(value) for name, value in store.spec.to_dict().items()}),
        "<h2>Examples</h2><p>Marked text is learnt; the rest is context.</p>",
        *(example(store, encoder, index) for index in picked),
    ]
    head = f'<meta charset="utf-8"><title>Samples of {esc(store.path.name)}</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(sections)}</body></html>\n"


def esc(text: object) -> str:
    return html.escape(str(text))


def table(rows: Mapping[str, str]) -> str:
    body = "".join(f"<tr><td class=soft>{esc(name)}</td><td>{esc(value)}</td></tr>" for name, value in rows.items())
    return f"<table>{body}</table>" if rows else ""


def quantiles(values: np.typing.NDArray[np.generic], *, percent: bool = False) -> str:
    """Least, median, 95th percentile and greatest."""
    if not len(values):
        return "none"
    found = np.quantile(np.asarray(values, np.float64), [0, 0.5, 0.95, 1])
    shown = [f"{value:.0%}" if percent else f"{value:,.0f}" for value in found]
    return "min {}, median {}, 95 % {}, max {}".format(*shown)


def drops_table(dropped: Mapping[str, int], path: Path) -> str:
    """Counts by reason with the first examples of each."""
    if not dropped:
        return "<p>nothing was dropped</p>"
    shown: dict[str, list[str]] = {reason: [] for reason in dropped}
    for row in drop_rows(path):
        if len(shown[row["reason"]]) < SHOWN_DROPS:
            shown[row["reason"]].append(f"row {row['row']} (id {row['id']}) {row['detail']}")
        if all(len(lines) >= min(SHOWN_DROPS, dropped[reason]) for reason, lines in shown.items()):
            break
    body = "".join(
        f"<tr><td class=n>{count:,}</td><td>{esc(reason)}</td>"
        f"<td class=soft>{'<br>'.join(map(esc, shown[reason]))}</td></tr>"
        for reason, count in dropped.items()
    )
    return f"<table>{body}</table>"


def drop_rows(path: Path) -> Iterable[dict[str, str]]:
    """Rows of the ledger of drops, one at a time; none when it is not there."""
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)


def histogram(tokens: np.typing.NDArray[np.int32]) -> str:
    """Bars over equal widths, as inline SVG."""
    if not len(tokens):
        return "<p>no samples</p>"
    counts, edges = np.histogram(tokens, bins=min(BINS, max(1, int(tokens.max() - tokens.min()) + 1)))
    width, top = 1000 / len(counts), counts.max()
    bars = "".join(
        f'<rect x="{at * width + 1:.1f}" y="{120 - 110 * count / top:.1f}" width="{width - 2:.1f}" '
        f'height="{110 * count / top:.1f}"><title>{low:,.0f} to {high:,.0f} tokens: {count:,}</title></rect>'
        for at, (count, (low, high)) in enumerate(zip(counts, itertools.pairwise(edges), strict=True))
    )
    labels = (
        f'<text x="0" y="136">{edges[0]:,.0f}</text><text x="1000" y="136" text-anchor="end">{edges[-1]:,.0f}</text>'
    )
    return f'<svg viewBox="0 0 1000 140" preserveAspectRatio="none" role="img">{bars}{labels}</svg>'


def example(store: SampleStore, encoder: Encoder, index: int) -> str:
    sample = store.row(index)
    parts = []
    for run in runs(sample, encoder):
        half = SHOWN_CHARS // 2
        text = run.text if len(run.text) <= SHOWN_CHARS else f"{run.text[:half]} [...] {run.text[-half:]}"
        parts.append(f"<mark>{esc(text)}</mark>" if run.learnt else esc(text))
    return f"<p class=soft>{esc(headline(sample))}</p><pre>{''.join(parts)}</pre>"
