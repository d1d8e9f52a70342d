"""The `datasets` builder behind every name of ours.

It resolves to a finished build (data_dir, then the cache), else a mirror, else generation through configured servers,
else an error that names all three. What goes into the Arrow cache is only an index; tensors stay in the shards and are
read by mmap when a row is asked for, so no byte is stored twice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import datasets
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter
from datasets.builder import Key

from eagle3_data.builders.recipe import Recipe
from eagle3_data.errors import ConfigError, DatasetUnavailable
from eagle3_data.loading import build_home
from eagle3_data.manifest import MANIFEST, Manifest
from eagle3_data.shards.reader import ShardSet
from eagle3_data.shards.remote import RemoteShardSet

ROWS = datasets.Features(
    {
        "key": datasets.Value("string"),
        "id": datasets.Value("string"),
        "shard": datasets.Value("string"),
        "tokens": datasets.Value("int32"),
        "supervised": datasets.Value("int32"),
        "next_token": datasets.Value("int32"),
        "row": datasets.Value("int64"),
    }
)
META = ("key", "id", "tokens", "supervised", "next_token")


@dataclass
class Eagle3Config(datasets.BuilderConfig):  # type: ignore[misc]  # datasets has no types
    """`load_dataset(..., server=..., mirror=..., inputs=..., columns=...)`; `data_dir` is a build folder."""

    server: str | tuple[str, ...] | None = None
    """URL(s) of patched servers: generates the data set when no build or mirror is at hand."""
    mirror: str | None = None
    """`org/name` on the hub, or any fsspec URL of a published build."""
    revision: str | None = None
    """Of the mirror."""
    inputs: str | tuple[str, ...] | None = None
    """Conversation files, for generation."""
    model: str | None = None
    """Tokenizer of the target, for generation; default: the recipe's model."""
    columns: tuple[str, ...] | None = None
    """Tensors to read; None: all."""


@lru_cache(maxsize=16)
def open_shards(location: str, content_id: str) -> ShardSet | RemoteShardSet:
    """`location`: folder or mirror. `content_id` keeps a grown or replaced build from being served from this cache."""
    return RemoteShardSet.open(location) if is_mirror(location) else ShardSet.open(location)


def is_mirror(location: str) -> bool:
    return not Path(location).is_absolute()


@dataclass(frozen=True)
class LazyTensors:
    """Transform of the index rows into samples; pickles as two strings and a tuple."""

    location: str
    content_id: str
    columns: tuple[str, ...] | None

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if "row" not in batch:
            return batch  # a single index column was asked for
        shards = open_shards(self.location, self.content_id)
        samples = [shards.read(row, self.columns) for row in batch["row"]]
        out: dict[str, list[Any]] = {name: batch[name] for name in META if name in batch}
        for name in samples[0] if samples else ():
            out[name] = [sample[name] for sample in samples]
        return out


class Eagle3Builder(datasets.GeneratorBasedBuilder):  # type: ignore[misc]  # datasets has no types
    """Subclasses set RECIPE and BUILDER_CONFIGS, nothing else."""

    BUILDER_CONFIG_CLASS = Eagle3Config
    DEFAULT_CONFIG_NAME = "default"
    RECIPE: ClassVar[Recipe | None] = None
    info: Any  # declared by the base, which has no types

    def _info(self) -> datasets.DatasetInfo:
        summary = self.RECIPE.summary if self.RECIPE else "A build of eagle3-data."
        return datasets.DatasetInfo(description=summary, features=ROWS)

    def _create_builder_config(self, *args: Any, **kwargs: Any) -> tuple[Eagle3Config, str]:
        """The content joins the cache key: another content, another Arrow index."""
        config, config_id = super()._create_builder_config(*args, **kwargs)
        found = self._local_build(config)
        if found is not None:
            config_id = f"{config_id}-{Manifest.load(found).content_id}"
        return config, config_id

    def _local_build(self, config: Eagle3Config) -> Path | None:
        """A folder with sealed shards: `data_dir`, else the cache."""
        if config.data_dir is not None:
            folder = Path(config.data_dir)
            if not (folder / MANIFEST).exists() and config.server is None:
                raise ConfigError(f"data_dir {folder} holds no build", next="eagle3-data build --help")
        else:
            folder = build_home(self.dataset_name)
        return folder.resolve() if (folder / MANIFEST).exists() else None

    def _locate(self) -> tuple[str, str]:
        """(location, content id) of what will be read. Raises DatasetUnavailable naming the three ways."""
        config: Eagle3Config = self.config
        local = self._local_build(config)
        if local is not None and (config.server is None or Manifest.load(local).state == "complete"):
            manifest = Manifest.load(local)
            if not manifest.shards:
                raise DatasetUnavailable(f"{local} has no sealed shard yet", next=f"eagle3-data status {local}")
            self._check(manifest, str(local))
            return str(local), manifest.content_id
        if config.mirror is not None:
            shards = RemoteShardSet.open(config.mirror, config.revision)
            self._check(shards.manifest, config.mirror)
            return shards.url, shards.manifest.content_id
        if config.server is not None:
            from eagle3_data.builders.generate import generate

            folder = generate(self.RECIPE, config, build_home(self.dataset_name))
            return str(folder), Manifest.load(folder).content_id
        raise DatasetUnavailable(
            f"{self.dataset_name}: no build, no mirror and no server at hand",
            next=(
                "one of these three:\n"
                f"    a build:  load_dataset(..., data_dir='FOLDER')   (looked in {build_home(self.dataset_name)})\n"
                "    a mirror: load_dataset(..., mirror='ORG/NAME')   (a hub repository, or an fsspec URL)\n"
                "    a server: load_dataset(..., server='http://HOST:PORT', inputs='conversations.jsonl')   "
                "(eagle3-data serve starts one)"
            ),
        )

    def _check(self, manifest: Manifest, where: str) -> None:
        """A build of other states must not pass for this data set."""
        if self.RECIPE is None:
            return
        want, found = self.RECIPE.capture, manifest.spec
        for field in ("layers", "width", "norm", "convention"):
            if getattr(want, field) != getattr(found, field):
                raise ConfigError(
                    f"{where} is not {self.RECIPE.name}: {field} is {getattr(found, field)}, "
                    f"expected {getattr(want, field)}"
                )

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        location, content_id = self._locate()
        shards = open_shards(location, content_id)
        names = [row.name for row in shards.manifest.shards]
        return [
            datasets.SplitGenerator(
                name=shards.manifest.split,
                gen_kwargs={"shards": names, "location": location, "content_id": content_id},
            )
        ]

    def _prepare_split(
        self,
        split_generator: datasets.SplitGenerator,
        file_format: str = "arrow",
        num_proc: int | None = None,
        max_shard_size: int | str | None = None,
    ) -> None:
        """Write the index in the one file that `datasets` will read: seconds at any size, so nothing to parallelise."""
        location = split_generator.gen_kwargs["location"]
        shards = open_shards(location, split_generator.gen_kwargs["content_id"])
        table = index_rows(shards)
        path = Path(self._output_dir) / f"{self.dataset_name}-{split_generator.name}.arrow"
        with ArrowWriter(features=ROWS, path=str(path)) as writer:
            writer.write_table(table)
            writer.finalize()
        split_generator.split_info.num_examples = len(shards)
        split_generator.split_info.num_bytes = shards.manifest.nbytes

    def _as_dataset(self, split: Any = datasets.Split.TRAIN, in_memory: bool = False) -> datasets.Dataset:
        location, content_id = self._locate()
        columns = tuple(self.config.columns) if self.config.columns else None
        return super()._as_dataset(split, in_memory).with_transform(LazyTensors(location, content_id, columns))

    def _generate_examples(
        self, shards: list[str], location: str, content_id: str
    ) -> Iterator[tuple[Key, dict[str, Any]]]:
        """Streaming: the samples of some shards, tensors included."""
        columns = tuple(self.config.columns) if self.config.columns else None
        source = open_shards(location, content_id)
        for number, shard in enumerate(shards):
            rows = source.rows_of(shard)
            index = source.index.slice(rows.start, len(rows)).select(META).to_pylist()
            for row, meta in zip(rows, index, strict=True):
                yield Key(number, row - rows.start), {**meta, **source.read(row, columns)}

    def _as_streaming_dataset_single(self, splits_generator: Any, *args: Any, **kwargs: Any) -> Any:
        """Without declared features, so that bf16 tensors pass (Arrow has no bf16)."""
        info: datasets.DatasetInfo = self.info
        self.info = copy.deepcopy(info)
        self.info.features = None
        try:
            return super()._as_streaming_dataset_single(splits_generator, *args, **kwargs)
        finally:
            self.info = info


def index_rows(shards: ShardSet | RemoteShardSet) -> pa.Table:
    table = shards.index.select(["key", "id", "shard", "tokens", "supervised", "next_token"])
    return table.append_column("row", pa.array(range(len(shards)), pa.int64()))


def configs(recipe: Recipe | None) -> list[Eagle3Config]:
    """One config per data set; the version is on the config, since `datasets` ignores the builder's then."""
    summary = recipe.summary if recipe else "Any build folder (data_dir=) or mirror (mirror=)."
    version = datasets.Version(recipe.version if recipe else "1.0.0")
    return [Eagle3Config(name="default", version=version, description=summary)]
