"""The GPU tables of docs/gpu.md, made from the results under benchmarks/results; `--check` fails when they differ.

    python benchmarks/gpu/tables.py [--check]

Only results taken on a GPU are printed. What has no result is said to be not measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- made by benchmarks/gpu/tables.py -->\n", "<!-- end -->\n"
Rows = list[dict[str, Any]]


def table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def overhead(rows: Rows) -> str:
    """Medians; a ratio is the median of the rounds' ratios."""
    timed = [row for row in rows if "repeat" in row and row["mode"] != "soak"]
    lines = []
    for tokens, in_flight in dict.fromkeys((row["tokens"], row["in_flight"]) for row in timed):
        mine = [row for row in timed if (row["tokens"], row["in_flight"]) == (tokens, in_flight)]
        plain = {row["repeat"]: row for row in mine if row["mode"] == "plain"}
        for mode in dict.fromkeys(row["mode"] for row in mine if row["mode"] != "plain"):
            pairs = [(row, plain[row["repeat"]]) for row in mine if row["mode"] == mode and row["repeat"] in plain]
            if not pairs:
                continue
            ratio = statistics.median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs)
            rate = statistics.median(a["tokens_per_s"] for a, _ in pairs)
            base = statistics.median(b["tokens_per_s"] for _, b in pairs)
            latency = lag = ""
            if "latency_p50_s" in pairs[0][0]:
                slower = statistics.median(a["latency_p50_s"] / b["latency_p50_s"] for a, b in pairs)
                latency = f"{slower - 1:+.1%}"
                lag = f"{max(a['lag_max_s'] or 0.0 for a, _ in pairs):.2f} s"
            failed = sum(sum(a["errors"].values()) for a, _ in pairs)
            lines.append(
                [
                    *(f"{tokens:,}", f"{in_flight}", mode, f"{base:,.0f}", f"{rate:,.0f}", f"{ratio:.3f}"),
                    *(latency, lag, str(failed), str(len(pairs))),
                ]
            )
    lines += [noted(row) for row in rows if "ratios" in row]
    head = [
        "prompt tokens",
        "in flight",
        "mode",
        "plain tok/s",
        "tok/s",
        "ratio",
        "p50 latency",
        "longest lag",
        "failed",
    ]
    memory = [f"{row['mode']}: {row.get('plain_mib')} / {row['capture_mib']}" for row in rows if "capture_mib" in row]
    return table([*head, "rounds"], lines) + f"\nGPU memory, plain / capturing server, MiB: {'; '.join(memory)}.\n"


def noted(row: dict[str, Any]) -> list[str]:
    """A case of a run of which only the rounds' ratios are left."""
    slower, lag = row.get("latency_p50_ratio"), row.get("lag_max_s")
    return [
        *(f"{row['tokens']:,}", str(row["in_flight"]), row["mode"], "", "", f"{statistics.median(row['ratios']):.3f}"),
        *("" if slower is None else f"{slower - 1:+.1%}", "" if lag is None else f"{lag:.2f} s", ""),
        str(len(row["ratios"])),
    ]


def architectures(rows: Rows) -> str:
    lines = []
    for row in rows:
        if "refused" in row:
            lines.append([row["architecture"], "refused", "", "", row["refused"].splitlines()[-1][:160]])
            continue
        worst = ", ".join(f"{name} {value:.1e}" for name, value in row["max_difference"].items())
        layers = ", ".join(map(str, row["layers"]))
        lines.append([row["architecture"], layers, f"{row['bytes_per_token']:,}", worst, str(len(row["left"]))])
    return table(["architecture", "layers", "B/token", "largest difference to hooks", "left in the spool"], lines)


def parallel(rows: Rows) -> str:
    lines = []
    for row in rows:
        if "refused" in row:
            lines.append([row["way"], "refused", "", "", row["refused"].splitlines()[-1][:160]])
        else:
            errors = f"{row['aux_error']:.1e} / {row['last_error']:.1e} ({row['compared_with']})"
            lines.append([row["way"], str(row["dumps"]), str(row["width"]), errors, str(len(row["left"]))])
    return table(["", "dumps", "width", "median error (aux / last) to", "left in the spool"], lines)


def fidelity(rows: Rows) -> str:
    lines = []
    for row in rows:
        if "mode" in row:
            name, same = f"{row['dtype']}, {row['mode']}", f"{row['bit_equal']} of {row['prompts']} dumps bit-equal"
            lines.append([name, same, "", "", ""])
            continue
        top = f"{row['top1_share']:.4%} of {row['positions']:,} (largest gap {row['largest_gap']:.3f})"
        ways = ("", "_to_float32", "_transformers_to_float32")
        errors = [f"{row[f'aux{way}_error']:.1e} / {row[f'last{way}_error']:.1e}" for way in ways]
        lines.append([row["dtype"], top, *errors])
    head = ["", "top-1 equals the server's", "to transformers", "to transformers in float32"]
    text = "\nMedians over all positions of ||a - b|| / ||b||, aux / last state.\n"
    return table([*head, "transformers to itself in float32"], lines) + text


def studies(rows: Rows) -> str:
    """Stages of the studies with real weights: one line a stage, one line an evaluation."""
    lines = []
    for row in rows:
        rest = {key: value for key, value in row.items() if key not in ("stage", "seconds")}
        evaluations = list(evaluations_of((), rest))
        seconds = f"{row['seconds']:.0f}" if "seconds" in row else ""
        for where, found in evaluations:
            name = " ".join((row["stage"], *(part.replace("in_flight_", "") for part in where), "in flight"))
            lines.append([name, "", evaluation(found)])
        if not evaluations:
            lines.append([row["stage"], seconds, ", ".join(shown(key, value) for key, value in rest.items())])
    return table(["stage", "s", ""], lines)


def evaluations_of(where: tuple[str, ...], node: Any) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    if isinstance(node, dict) and ("acceptance_length" in node or "rounds" in node):
        yield where, node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from evaluations_of((*where, key), value)


def evaluation(found: dict[str, Any]) -> str:
    parts = []
    if "acceptance_length" in found:
        parts.append(f"acceptance length {found['acceptance_length']:.2f}")
    if "tokens_per_s" in found:
        parts.append(f"{found['tokens_per_s']:,.0f} tok/s")
    if "speedup" in found:
        parts.append(f"{found['speedup']:.2f}x of no draft")
    if "equal_answers" in found:
        parts.append(f"{found['equal_answers']} of {found['prompts']} answers equal")
    return ", ".join(parts)


def shown(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"{key}: ({', '.join(shown(inner, part) for inner, part in value.items())})"
    return f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {str(value)[:300]}"


def ranks(rows: Rows) -> str:
    """Each way's speed, memory and curve, against one GPU's on the same samples."""
    lines = []
    for row in rows:
        name = [row["way"], row["precision"]]
        if "failed" in row:
            lines.append([*name, "failed", "", "", row["failed"].splitlines()[-1][:160]])
            continue
        near = row.get("against_one")
        curve = f"{near['max_difference']:.1e} in {near['steps']} steps" if near else ""
        peak = max(row["peak_bytes"]) / (1 << 30)
        held = f"{max(row['parameters_here']) / row['parameters']:.2f}"
        lines.append([*name, f"{row['tokens_per_s']:,.0f}", f"{peak:.2f}", held, curve])
    head = ["", "precision", "tok/s", "peak GiB of a GPU", "share of the weights on it"]
    return table([*head, "largest difference of the loss to one GPU"], lines)


SECTIONS: dict[str, tuple[str, Callable[[Rows], str]]] = {
    "overhead": ("What capture costs", overhead),
    "architectures": ("Right layers", architectures),
    "parallel": ("Several GPUs", parallel),
    "ranks": ("Training on two GPUs", ranks),
    "fidelity": ("Real weights", fidelity),
    "end_to_end": ("From questions to a faster server", studies),
    "deeper": ("The same draft in front of a slower target", studies),
    "rival": ("SpecForge's trainer on the same data", studies),
    "encodings": ("The same training on other encodings", studies),
}


def page_part() -> str:
    found = {}
    for path in sorted(RESULTS.glob("gpu_*.json")):
        body = json.loads(path.read_text())
        if body["device"] == "cuda":
            found[body["benchmark"]] = (path, body)
    parts = []
    for name, (title, make) in SECTIONS.items():
        parts.append(f"### {title}\n\n")
        if name not in found:
            parts.append("Not measured on a GPU yet.\n\n")
            continue
        path, body = found[name]
        ran = ", ".join(f"{key} {value}" for key, value in body["versions"].items())
        note = f"\nNote: {body['note']}.\n" if "note" in body else ""
        parts.append(f"{make(body['rows'])}{note}\n`{path.relative_to(ROOT)}`; {ran}.\n\n")
    return "".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = before + BEGIN + "\n" + page_part() + END + after
    if options.check:
        if new != text:
            print(f"{PAGE} is not what the results say; run: python benchmarks/gpu/tables.py")
        return int(new != text)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
