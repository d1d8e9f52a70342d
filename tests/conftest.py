"""Fixtures of all tests: tiny models, and the real SGLang server (see tests/servers.py)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import tiny_model
from tests.servers import KINDS, RunningServer, ServerPark

SERVER_FIXTURES = {f"{kind}_server": place for place, kind in enumerate(KINDS)}


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist writes the groups into the ids
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Server tests last, ordered by the server they need, and all in one worker."""

    def place(item: pytest.Item) -> int:
        wanted = [SERVER_FIXTURES[name] for name in getattr(item, "fixturenames", ()) if name in SERVER_FIXTURES]
        return max(wanted) if wanted else len(KINDS) if item.get_closest_marker("server") else -1

    items.sort(key=place)  # stable: within a kind the order stays
    for item in items:
        if place(item) >= 0:
            item.add_marker(pytest.mark.server)
            item.add_marker(pytest.mark.xdist_group("server"))
            if importlib.util.find_spec("sglang") is None:
                item.add_marker(pytest.mark.skip(reason="SGLang is not installed (see docs/server.md)"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """pytest 9.2 takes no id from pytest-xdist 3.8: its groups are lost without a word, and each worker has servers."""
    if getattr(session.config.option, "loadgroup", False):
        marked = [item for item in session.items if item.get_closest_marker("xdist_group") is not None]
        if any("@" not in item.nodeid for item in marked):
            raise pytest.UsageError("pytest-xdist does not keep groups with this pytest: see requirements/tools.txt")


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """Folder of a random float32 Llama: 8 layers, 64 wide, context 4096, with tokenizer and chat template."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def tiny_qwen3() -> Path:
    """Folder of a random float32 Qwen3 of the same size."""
    return tiny_model("qwen3")


@pytest.fixture(scope="session")
def server_park() -> Iterator[ServerPark]:
    park = ServerPark()
    yield park
    park.close()


@pytest.fixture
def llama_server(server_park: ServerPark) -> RunningServer:
    """A patched server with the tiny Llama, one chunk per prompt."""
    return server_park.get("llama")


@pytest.fixture
def capture_server(llama_server: RunningServer) -> RunningServer:
    """Any patched server."""
    return llama_server


@pytest.fixture
def chunked_server(server_park: ServerPark) -> RunningServer:
    """The tiny Llama in chunks of 64 tokens."""
    return server_park.get("chunked")


@pytest.fixture
def qwen3_server(server_park: ServerPark) -> RunningServer:
    """A patched server with the tiny Qwen3."""
    return server_park.get("qwen3")


@pytest.fixture
def tp_server(server_park: ServerPark) -> RunningServer:
    """The tiny Llama on two tensor-parallel ranks, in chunks of 64 tokens."""
    return server_park.get("tp")


@pytest.fixture
def dp_server(server_park: ServerPark) -> RunningServer:
    """The tiny Qwen3 on two ranks that each have attention, and prompts, of their own."""
    return server_park.get("dp")
