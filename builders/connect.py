"""From URLs to a pool: every server is asked what it captures, and must be what the build needs."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig

from eagle3_data.builders.matching import Strength, matcher_class
from eagle3_data.builders.pool import CameBack, FlowConfig, Server, ServerPool
from eagle3_data.builders.spool import LocalSpool, RemoteSpool, Spool
from eagle3_data.capture import CaptureSpec, Encoding
from eagle3_data.errors import ConfigError, ServerUnfit
from eagle3_data.manifest import ServerRow
from eagle3_data.protocol import LAYER_CONVENTION, PROTOCOL_VERSION, CaptureInfo, default_aux_layers, instance_marker
from eagle3_data.server.client import ServerClient


def same_model(asked: str, served: str) -> bool:
    """Whether two names mean one model: equal, the same folder, or equal last parts (`org/Name`, `/models/Name`)."""
    if asked == served or Path(asked).name == Path(served).name:
        return True
    return Path(asked).exists() and Path(served).exists() and Path(asked).resolve() == Path(served).resolve()


def spec_of(
    info: CaptureInfo, model: str, last: str, encoding: Encoding = "bf16", last_encoding: Encoding | None = None
) -> CaptureSpec:
    """The spec of the data that this server gives."""
    return CaptureSpec(
        model=model,
        layers=info.layers,
        width=info.width,
        dtype=info.dtype,
        last=last,
        norm=info.norm,
        convention=info.convention,
        vocab_size=info.vocab_size,
        aux_encoding=encoding,
        last_encoding=(last_encoding or encoding) if last == "hidden" else "bf16",
    )


def check_fits(info: CaptureInfo, spec: CaptureSpec, url: str) -> None:
    """Raises ServerUnfit, naming the field, when the server would give other data than `spec` says."""
    if not same_model(spec.model, info.model_path):
        raise ServerUnfit(
            f"{url} serves {info.model_path}, the build is for {spec.model}",
            next="start the server with that model, or pass --model as the server names it",
        )
    if info.radix_cache:
        raise ServerUnfit(f"{url} has its radix cache on: prompts would come back short", next="--disable-radix-cache")
    for field in ("layers", "width", "dtype", "norm", "convention", "vocab_size"):
        found, want = getattr(info, field), getattr(spec, field)
        if found != want:
            raise ServerUnfit(f"{url}: {field} is {found}, the build needs {want}", next="eagle3-data serve --help")


def spool_is_shared(info: CaptureInfo) -> bool:
    """Whether this machine sees the server's own spool folder, not just one of the same name."""
    return instance_marker(Path(info.spool), info.instance).exists()


def server_row(info: CaptureInfo) -> ServerRow:
    return ServerRow(
        instance=info.instance,
        sglang_version=info.sglang_version,
        plugin_version=info.plugin_version,
        path=info.path,
        device=info.device,
        tp_size=info.tp_size,
        dp_size=info.dp_size,
        chunk_tokens=info.chunk_tokens,
    )


@dataclass(frozen=True, slots=True)
class Probed:
    """A server that answered; one info per data-parallel rank, all of the same capture."""

    client: ServerClient
    infos: tuple[CaptureInfo, ...]


async def probe(urls: Sequence[str], api_key: str | None) -> list[Probed]:
    """All servers, asked at once. Raises ServerError or ServerUnfit for the first that is missing or unpatched."""
    if not urls:
        raise ConfigError("no server given", next="--server http://HOST:PORT (start one with: eagle3-data serve)")
    clients = [ServerClient(url, api_key=api_key) for url in urls]
    try:
        answers = await asyncio.gather(*(client.capture_infos() for client in clients))
    except BaseException:
        for client in clients:
            await client.close()
        raise
    return [Probed(client, tuple(infos)) for client, infos in zip(clients, answers, strict=True)]


def foreign_info(model: str, spool: Path, layers: Sequence[int] | None) -> CaptureInfo:
    """What the user says of a server that says nothing of itself (an older patch; matching by token count).

    Widths come from the model's config. Raises ConfigError when the folder or the config is not there.
    """
    if not spool.is_dir():
        raise ConfigError(
            f"spool {spool} is not a folder", next="--spool: where the older patch writes its req_* folders"
        )
    config = AutoConfig.from_pretrained(model)
    text = config.get_text_config()
    dtype = str(text.dtype or config.dtype or "bfloat16").removeprefix("torch.")
    return CaptureInfo(
        protocol=PROTOCOL_VERSION,
        plugin_version="none",
        sglang_version="unknown",
        instance="unknown",
        path="foreign",
        model_path=model,
        layers=tuple(layers or default_aux_layers(text.num_hidden_layers)),
        convention=LAYER_CONVENTION,
        norm="post",
        dtype=dtype,
        width=text.hidden_size,
        vocab_size=text.vocab_size,
        context_length=text.max_position_embeddings,
        tp_size=0,
        dp_size=0,
        chunk_tokens=-1,
        radix_cache=False,
        device="unknown",
        spool=str(spool),
        free_bytes=shutil.disk_usage(spool).free,
        high_water_bytes=shutil.disk_usage(spool).free // 2,
        backlog_bytes=0,
        dumps_written=0,
        dumps_failed=0,
    )


async def nobody(infos: Sequence[CaptureInfo]) -> None:
    """For pools whose servers are not recorded."""


def make_pool(
    found: Sequence[Probed],
    spec: CaptureSpec,
    flow: FlowConfig,
    matching: Strength,
    scratch: Path,
    came_back: CameBack = nobody,
) -> ServerPool:
    """A pool over probed servers; `came_back` hears of one that was away. Raises ServerUnfit when one does not fit."""
    servers = []
    for number, probed in enumerate(found):
        client, info = probed.client, probed.infos[0]
        for rank in probed.infos:
            check_fits(rank, spec, client.url)
        folder = Path(info.spool)
        spool: Spool
        if matching == "token_count":
            spool, matcher = LocalSpool(folder), matcher_class(matching)(folder, spec)
        else:
            spool = LocalSpool(folder) if spool_is_shared(info) else RemoteSpool(client, scratch / f"server-{number}")
            matcher = matcher_class(matching)(spool, spec)
        budget = flow.inflight_bytes or info.high_water_bytes // 2
        servers.append(Server(client, info, spool, matcher, budget))
    return ServerPool(
        servers, flow, spec.dump_bytes_per_token, lambda info, url: check_fits(info, spec, url), came_back
    )
