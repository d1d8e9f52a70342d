"""The `datasets` builder behind every name of ours.

It resolves to a finished build (data_dir, then the cache), else a mirror, else generation through configured servers,
else an error that names all three. What goes into the Arrow cache is only an index; tensors stay in the shards and are
read by mmap when a row is asked for, so no byte is stored twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import datasets
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter
from datasets.builder import Key

from eagle3_data.builders.exports import refuse_exports
from eagle3_data.builders.formats import teach_formats
from eagle3_data.builders.mapping import teach_filter, teach_map
from eagle3_data.builders.recipe import Recipe
from eagle3_data.builders.streams import teach_streams
from eagle3_data.builders.tensors import Place, StateTensor
from eagle3_data.capture import CaptureSpec, Encoding
from eagle3_data.errors import ConfigError, DatasetUnavailable
from eagle3_data.loading import build_home
from eagle3_data.manifest import MANIFEST, Manifest
from eagle3_data.shards.cache import CacheConfig, choose_cache
from eagle3_data.shards.reader import ShardSet
from eagle3_data.shards.remote import RemoteShardSet
from eagle3_data.shards.sources import Access
from eagle3_data.shards.table import SampleTable

META = {
    "key": "string",
    "id": "string",
    "shard": "string",
    "tokens": "int32",
    "supervised": "int32",
    "next_token": "int32",
}
"""Columns of the index that become columns of the data set, as they are."""
AHEAD = 32
"""Rows that a stream names to the reader before they are asked for; how many are fetched is the reader's budget."""

refuse_exports()
teach_map()
teach_filter()
teach_formats()
teach_streams()


@dataclass
class Eagle3Config(datasets.BuilderConfig):  # type: ignore[misc, unused-ignore]
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
    columns: str | tuple[str, ...] | None = None
    """Tensors to have as columns; None: all, (): the index alone."""
    encoding: Encoding | None = None
    """How generation stores the states; a build that exists keeps its own, and is decoded when it is read."""
    shard_cache: str | None = None
    """Folder that keeps shards of a mirror; None: $EAGLE3_DATA_SHARD_CACHE, else samples are read by ranges."""
    shard_cache_size: int | str | None = None
    """At most this much there (bytes, or a text like '100GB'); the shard whose last use is oldest goes first."""

    def cache(self) -> CacheConfig | None:
        return choose_cache(self.shard_cache, self.shard_cache_size)

    def place(self, location: str, content_id: str, access: Access) -> Place:
        cache = self.cache()
        return Place(
            location, content_id, str(cache.folder) if cache else "", cache.limit_bytes if cache else 0, access
        )

    def tensors(self, capture: CaptureSpec, place: Place | None) -> dict[str, StateTensor]:
        """The tensor columns, in file order. Raises ConfigError for a name that is none."""
        known = {name: dtype for name, dtype, _ in capture.tensors(1)}
        asked = (self.columns,) if isinstance(self.columns, str) else self.columns
        for name in asked or ():
            if name not in known:
                raise ConfigError(f"no column {name!r}; the tensors are {', '.join(known)}")
        return {
            name: place.column(name, dtype) if place else StateTensor(name, dtype)
            for name, dtype in known.items()
            if asked is None or name in asked
        }


@lru_cache(maxsize=16)
def open_mirror(mirror: str, revision: str | None, cache: CacheConfig | None, access: Access) -> RemoteShardSet:
    """One look at manifest and index for the several steps of one `load_dataset`."""
    return RemoteShardSet.open(mirror, revision, cache=cache, access=access)


class Eagle3Builder(datasets.GeneratorBasedBuilder):  # type: ignore[misc, unused-ignore]
    """Subclasses set RECIPE and BUILDER_CONFIGS, nothing else."""

    BUILDER_CONFIG_CLASS = Eagle3Config
    DEFAULT_CONFIG_NAME = "default"
    RECIPE: ClassVar[Recipe | None] = None
    info: Any  # declared by the base, which has no types

    def _info(self) -> datasets.DatasetInfo:
        summary = self.RECIPE.summary if self.RECIPE else "A build of eagle3-data."
        known = self._known()
        if known is None and self.RECIPE is None and self.config.server is None:
            raise self._nothing_at_hand()  # nothing is known of it: said here, before `datasets` wraps it
        capture = known.spec if known else self.RECIPE.capture if self.RECIPE else None
        info = datasets.DatasetInfo(description=summary, features=self._features(capture, None) if capture else None)
        if known is not None and known.state == "complete":
            size = datasets.SplitInfo(known.split, num_bytes=known.nbytes, num_examples=known.saved)
            info.splits = datasets.SplitDict({known.split: size}, dataset_name=self.dataset_name)
        elif known is None and self.RECIPE is not None and self.config.server is None:
            # its name is known and its size is not; without it `get_dataset_config_info` would look for the data
            name = datasets.SplitInfo(self.RECIPE.split)
            info.splits = datasets.SplitDict({self.RECIPE.split: name}, dataset_name=self.dataset_name)
        return info

    def _known(self) -> Manifest | None:
        """Of the build or mirror at hand; nothing is generated to find out."""
        local = self._local_build(self.config)
        if local is not None:
            return Manifest.load(local)
        return self._mirror(self.config).manifest if self.config.mirror is not None else None

    def _features(self, capture: CaptureSpec, place: Place | None) -> datasets.Features:
        index = {name: datasets.Value(dtype) for name, dtype in META.items()}
        return datasets.Features({**index, **self.config.tensors(capture, place)})

    def _create_builder_config(self, *args: Any, **kwargs: Any) -> tuple[Eagle3Config, str]:
        """The content joins the cache key: another content, another Arrow index."""
        config, config_id = super()._create_builder_config(*args, **kwargs)
        found = self._local_build(config)
        if found is not None:
            config_id = f"{config_id}-{Manifest.load(found).content_id}"
        elif config.mirror is not None:
            config_id = f"{config_id}-{self._mirror(config).manifest.content_id}"
        return config, config_id

    def _mirror(self, config: Eagle3Config) -> RemoteShardSet:
        assert config.mirror is not None
        return open_mirror(config.mirror, config.revision, config.cache(), self._access())

    def _access(self) -> Access:
        return Access.of(getattr(self, "token", None), getattr(self, "storage_options", None))

    def _local_build(self, config: Eagle3Config) -> Path | None:
        """A folder with sealed shards: `data_dir`, else the cache."""
        if config.data_dir is not None:
            folder = Path(config.data_dir)
            if not (folder / MANIFEST).exists() and config.server is None:
                raise ConfigError(f"data_dir {folder} holds no build", next="eagle3-data build --help")
        else:
            folder = build_home(self.dataset_name)
        return folder.resolve() if (folder / MANIFEST).exists() else None

    def _locate(self) -> tuple[str, SampleTable]:
        """(location, what is there). Raises DatasetUnavailable naming the three ways."""
        config: Eagle3Config = self.config
        local = self._local_build(config)
        if local is not None and (config.server is None or Manifest.load(local).state == "complete"):
            shards = ShardSet.open(local, config.cache(), self._access())
            if not shards.manifest.shards:
                raise DatasetUnavailable(f"{local} has no sealed shard yet", next=f"eagle3-data status {local}")
            self._check(shards.manifest, str(local))
            return str(local), shards
        if config.mirror is not None:
            mirror = self._mirror(config)
            self._check(mirror.manifest, config.mirror)
            return mirror.url, mirror
        if config.server is not None:
            from eagle3_data.builders.generate import generate

            folder = generate(self.RECIPE, config, build_home(self.dataset_name)).resolve()
            return str(folder), ShardSet.open(folder)
        raise self._nothing_at_hand()

    def _nothing_at_hand(self) -> DatasetUnavailable:
        return DatasetUnavailable(
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

    def _open(self) -> tuple[Place, SampleTable]:
        """Find the data and let the columns read there. Everything that looks at rows begins with this."""
        location, table = self._locate()
        place = self.config.place(location, table.fingerprint, self._access())
        self.info.features = self._features(table.capture, place)
        return place, table

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        place, table = self._open()
        names = [row.name for row in table.manifest.shards]
        return [datasets.SplitGenerator(name=table.manifest.split, gen_kwargs={"shards": names, "place": place})]

    def _prepare_split(
        self,
        split_generator: datasets.SplitGenerator,
        file_format: str = "arrow",
        num_proc: int | None = None,
        max_shard_size: int | str | None = None,
    ) -> None:
        """Write the index in the one file that `datasets` will read: seconds at any size, so nothing to parallelise."""
        if file_format != "arrow":
            raise ConfigError(
                f"file_format={file_format!r} would copy the index without its states",
                next="read the build's own folder: its tar shards are the portable format",
            )
        table = split_generator.gen_kwargs["place"].table()
        features = self._features(table.capture, None)  # the place is put in when it is opened: folders move
        path = Path(self._output_dir) / f"{self.dataset_name}-{split_generator.name}.arrow"
        with ArrowWriter(features=features, path=str(path)) as writer:
            writer.write_table(index_rows(table, features))
            writer.finalize()
        split_generator.split_info.num_examples = len(table)
        split_generator.split_info.num_bytes = table.manifest.nbytes

    def _as_dataset(self, split: Any = datasets.Split.TRAIN, in_memory: bool = False) -> datasets.Dataset:
        self._open()
        return super()._as_dataset(split, in_memory)

    def _generate_examples(self, shards: list[str], place: Place) -> Iterator[tuple[Key, dict[str, Any]]]:
        """Streaming: rows of the index; tensors are read where a column is looked at."""
        table, names = place.table(), list(self.info.features or META)
        rows = [row for shard in shards for row in table.rows_of(shard)]
        at = 0
        for number, shard in enumerate(shards):
            span = table.rows_of(shard)
            for row, meta in zip(
                span, table.index.slice(span.start, len(span)).select(list(META)).to_pylist(), strict=True
            ):
                at += 1
                yield Key(number, row - span.start), {name: meta.get(name, row) for name in names}
                if table.remote:
                    place.ahead().expect(rows[at : at + AHEAD])


def index_rows(table: SampleTable, features: datasets.Features) -> pa.Table:
    """The Arrow table behind the data set: the index, and for each tensor column the row number."""
    rows, index = pa.array(range(len(table)), pa.int64()), table.index
    columns = {name: index.column(name) if name in META else rows for name in features}
    return pa.table(
        columns,
        schema=pa.schema(
            {
                name: feature() if name not in META else index.schema.field(name).type
                for name, feature in features.items()
            }
        ),
    )


def configs(recipe: Recipe | None) -> list[Eagle3Config]:
    """One config per data set; the version is on the config, since `datasets` ignores the builder's then."""
    summary = recipe.summary if recipe else "Any build folder (data_dir=) or mirror (mirror=)."
    version = datasets.Version(recipe.version if recipe else "1.0.0")
    return [Eagle3Config(name="default", version=version, description=summary)]
