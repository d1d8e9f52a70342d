"""What a folder remembers of its build, and what a resume may and may not change."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_data import durable
from eagle3_data.builders.connect import Probed, server_row
from eagle3_data.builders.ledger import Ledger
from eagle3_data.builders.plan import Plan
from eagle3_data.builders.samples.store import SampleStore
from eagle3_data.builders.settings import BuildConfig
from eagle3_data.capture import CaptureSpec
from eagle3_data.errors import LedgerError
from eagle3_data.failures import disagreement, read_failures
from eagle3_data.manifest import FAILURES, MANIFEST, Manifest
from eagle3_data.runlock import work_folder

PART = "shards"
"""Fingerprint field of a part of a build (`--shards i/n`)."""
HEAD = "head (weights that gave the top-k)"
"""Fingerprint field of what made the top-k; empty where there is none."""


def open_manifest(
    config: BuildConfig,
    store: SampleStore,
    spec: CaptureSpec,
    plan: Plan,
    found: Sequence[Probed],
    head_digest: str = "",
) -> Manifest:
    """The folder's manifest, checked against these settings, or a new one. Servers of this run are added."""
    fingerprint = make_fingerprint(config, store, spec, head_digest)
    rows = tuple(server_row(info) for one in found for info in one.infos)
    if (config.out / MANIFEST).exists():
        manifest = Manifest.load(config.out)
        manifest.check_same(fingerprint)
        _check_failures(config.out, manifest)
    else:
        manifest = Manifest(
            dataset=config.dataset,
            split=config.split,
            run=secrets.token_hex(4),
            capture=spec.to_dict(),
            samples=store.spec.to_dict(),
            fingerprint=fingerprint,
            matching=config.matching,
            # dropped ones are counted once: by the first part alone, so that parts add up
            plan=plan.row(dict(store.report.dropped) if config.part is None or config.part[0] == 0 else {}),
        )
    known = {row.instance for row in manifest.servers}
    servers = (*manifest.servers, *(row for row in rows if row.instance not in known))
    manifest = manifest.model_copy(update={"servers": servers, "state": "building"})
    manifest.save(config.out)
    return manifest


def _check_failures(folder: Path, manifest: Manifest) -> None:
    """Before anything is written. Raises LedgerError for rows that cannot be read, or are not those of the build."""
    if wrong := disagreement(read_failures(folder).values(), manifest):
        raise LedgerError(
            f"{folder}: {wrong}",
            next=f"take {FAILURES} from the mirror or a copy; nothing was changed",
        )


def make_fingerprint(
    config: BuildConfig, store: SampleStore, spec: CaptureSpec, head_digest: str = ""
) -> dict[str, str]:
    """Everything that shapes the shards, by the name an error should use."""
    fields: dict[str, Any] = {
        "dataset": config.dataset,
        "split": config.split,
        "samples (ids and masks)": store.digest,
        "shard_bytes": config.shard_bytes,
        "matching": config.matching,
        **({PART: "{}/{}".format(*config.part)} if config.part else {}),
        HEAD: head_digest,
        **{f"capture.{name}": value for name, value in spec.to_dict().items()},
        **{f"samples.{name}": value for name, value in store.spec.to_dict().items()},
    }
    return as_texts(fields)


def as_texts(fields: Mapping[str, Any]) -> dict[str, str]:
    """A fingerprint as the manifest stores it."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, sort_keys=True) for name, value in fields.items()
    }


def all_plans(config: BuildConfig, store: SampleStore, manifest: Manifest, base: Plan, ledger: Ledger) -> list[Plan]:
    """Shards for samples that were given up and are tried again; a sealed shard is never touched.

    A failed sample whose own shard is still open is simply tried again there.
    """
    path = work_folder(config.out) / "retries.json"
    rounds: list[list[int]] = json.loads(path.read_text()) if path.exists() else []
    plans = [base]
    whole_shards = len(Plan(store.tokens, base.spec, config.shard_bytes)) if config.part else len(base)

    def add(rows: list[int]) -> None:
        # numbers after the whole plan's; those of different parts never meet
        stride = config.part[1] if config.part else 1
        number = base.first_number % stride + whole_shards + stride * sum(len(plan) for plan in plans[1:])
        chosen = np.array(rows, np.int64)
        plans.append(
            Plan(
                store.tokens,
                base.spec,
                config.shard_bytes,
                split=config.split,
                rows=chosen,
                first_number=number,
                stride=stride,
            )
        )

    for rows in rounds:
        add(rows)
    if config.retry_failed and ledger.failures:
        sealed = {row.name for row in manifest.shards}
        still_open = {
            row for plan in plans for shard in plan if shard.name not in sealed for row in shard.rows.tolist()
        }
        failed = {row: key for row in range(len(store)) if (key := store.row(row).key) in ledger.failures}
        if unknown := ledger.failures.keys() - failed.values():
            raise LedgerError(
                f"{config.out / FAILURES}: {min(unknown)} is no sample of this build",
                next=f"mend its row, or take {FAILURES} from the mirror or a copy; nothing was changed",
            )
        rows = [row for row in failed if row not in still_open]
        if rows:
            add(rows)
            durable.write_text(path, json.dumps([*rounds, rows]))
        ledger.forgive()  # last: a sample that is neither failed nor planned would be lost
    return plans


def next_incarnation(out: Path) -> int:
    path = work_folder(out) / "incarnation"
    number = int(path.read_text()) + 1 if path.exists() else 0
    durable.write_text(path, str(number))
    return number
