"""Our samples in the forms that other trainers read: SpecForge's offline features, speculators' offline data.

Files get their names when they are whole, and what is there is not written again, so a stopped export goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3_data import durable
from eagle3_data.errors import ConfigError
from eagle3_data.protocol import AUX, IDS, LAST, MASK
from eagle3_data.train.loader import Samples

FILES_PER_FOLDER = 2000
WRITERS = 8
NOTE = ".eagle3-export"
"""Form and fingerprint of what a folder is filled with; hidden, as both projects list what lies there."""
OnSample = Callable[[int, int], None]
"""Called with samples done and samples in all."""


def export_specforge(data: Samples, out: Path, *, on_sample: OnSample) -> None:
    """`rows_{a}-{b}/data_{i}.ckpt`, torch files of four tensors, as SpecForge's prepare_hidden_states writes them."""
    _begin(data, out, "specforge")

    def write(i: int) -> None:
        low = i // FILES_PER_FOLDER * FILES_PER_FOLDER
        path = out / f"rows_{low}-{low + FILES_PER_FOLDER}" / f"data_{i}.ckpt"
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        read = data.read(i, (AUX, LAST, IDS, MASK))
        record = {
            "input_ids": read[IDS].long(),
            "loss_mask": read[MASK].long(),
            "aux_hidden_state": read[AUX][None].clone(),  # a view would bring its whole shard along
            "hidden_state": read[LAST][None].clone(),
        }
        torch.save(record, durable.hidden(path))
        durable.replace(path)

    _in_threads(write, len(data), on_sample)


def _in_threads(write: Callable[[int], None], count: int, on_sample: OnSample) -> None:
    """Small files wait for the disk far longer than they take to make."""
    with ThreadPoolExecutor(WRITERS) as writers:
        try:
            for done, _ in enumerate(writers.map(write, range(count)), start=1):
                on_sample(done, count)
        except BaseException:
            writers.shutdown(cancel_futures=True)
            raise


def export_speculators(data: Samples, out: Path, *, norm_weight: Tensor, on_sample: OnSample) -> None:
    """`hidden_states/hs_{i}.safetensors`, and beside it the Arrow data set with ids and masks.

    speculators applies the target's final norm itself. Ours are after it, so they are divided by its weight [W]: the
    norm of that is the same state again (its scale is lost in the norm anyway).
    """
    _begin(data, out, "speculators")
    layers = len(data.capture.layers)
    states, ids, masks = out / "hidden_states", [], []
    states.mkdir(parents=True, exist_ok=True)
    for i in range(len(data)):
        read = data.read(i, (IDS, MASK))
        ids.append(read[IDS].numpy().astype(np.int64))
        masks.append(read[MASK].numpy().astype(np.int64))

    def write(i: int) -> None:
        path = states / f"hs_{i}.safetensors"
        if path.exists():
            return
        read = data.read(i, (AUX, LAST))
        before = (read[LAST].float() / norm_weight.float()).to(read[LAST].dtype)
        aux = read[AUX].view(len(before), layers, -1)  # [T, L, W]
        hidden = torch.cat([aux, before[:, None]], dim=1)  # [T, L+1, W]
        save_file({"hidden_states": hidden, "token_ids": torch.from_numpy(ids[i])}, durable.hidden(path))
        durable.replace(path)

    _in_threads(write, len(data), on_sample)
    _save_rows(out, ids, masks)


def _save_rows(out: Path, ids: list[np.ndarray], masks: list[np.ndarray]) -> None:
    from datasets import Dataset

    offsets = pa.array(np.cumsum([0, *map(len, ids)]), pa.int32())
    table = pa.table(
        {
            "input_ids": pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(ids))),
            "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(masks))),
            "seq_len": pa.array([len(row) for row in ids], pa.int64()),
        }
    )
    Dataset(table).with_format("torch").save_to_disk(str(out))


def _begin(data: Samples, out: Path, form: str) -> None:
    """Raises ConfigError; leaves in `out` what is written there, so that no other data is mixed in."""
    if data.capture.last != "hidden":
        raise ConfigError("the data has no last hidden state, which both projects need")
    if len(data) == 0:
        raise ConfigError("the data has no sealed sample")
    what = f"{form} {data.fingerprint}\n"
    note = out / NOTE
    if not note.exists() and out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty", next="name another folder with --out")
    if note.exists() and note.read_text() != what:
        raise ConfigError(f"{out} holds an export of other data or in another form", next="name another folder")
    out.mkdir(parents=True, exist_ok=True)
    durable.write_text(note, what)
