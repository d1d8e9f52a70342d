"""Which SGLang functions are hooked, and in which process. Everything SGLang-specific starts here."""

from __future__ import annotations

import logging
import multiprocessing
import pkgutil
from pathlib import Path
from typing import Any

from eagle3_data.patches.sglang.capture import Capture
from eagle3_data.patches.sglang.facts import num_layers, server_args
from eagle3_data.patches.sglang.info import capture_info
from eagle3_data.patches.sglang.layers import set_layers
from eagle3_data.patches.sglang.refusals import (
    NATIVE,
    PREFIX,
    Refused,
    argument_refusals,
    node_refusals,
    parse_version,
    spool_refusals,
    writes_here,
)
from eagle3_data.patches.sglang.states import SRT, CapturePath, Hook, HookPath, NativePath
from eagle3_data.protocol import ProtocolError, SpoolConfig, default_aux_layers

logger = logging.getLogger(__name__)

SCHEDULER = SRT + "managers.scheduler.Scheduler."
HTTP_SERVER = SRT + "entrypoints.http_server."


def install(spool: Path) -> None:
    """Register every hook of this process with SGLang. Raises SystemExit when that would not work."""
    import sglang

    path: CapturePath = NativePath() if parse_version(sglang.__version__) >= NATIVE else HookPath()
    try:
        config = SpoolConfig.load(spool)
    except (ProtocolError, OSError) as error:
        raise SystemExit(f"{PREFIX}{error}") from error
    session = _Session(path, spool, config)
    hooks = [*path.hooks(session.on_model), *session.hooks()]
    if multiprocessing.parent_process() is None:  # the process that serves HTTP
        from eagle3_data.patches.sglang.routes import add_routes

        def before_serving(*args: object, **named: object) -> None:
            app = pkgutil.resolve_name(HTTP_SERVER + "app")
            server_args = named.get("server_args", args[0] if args else None)
            add_routes(app, spool, keyed=bool(getattr(server_args, "api_key", None)))

        hooks.append(Hook(HTTP_SERVER + "_setup_and_run_http_server", before_serving, "before"))
    _register(hooks, sglang.__version__)


def _register(hooks: list[Hook], version: str) -> None:
    """SGLang only logs a hook whose target is missing, so the targets are looked up here first."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        owner, _, name = hook.target.rpartition(".")
        try:
            getattr(pkgutil.resolve_name(owner), name)
        except (ImportError, AttributeError) as error:
            raise SystemExit(
                f"{PREFIX}SGLang {version} has no {hook.target} ({error}); install a version that eagle3-data knows"
            ) from error
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))


class _Session:
    """One process's capture, from arguments to a running scheduler."""

    def __init__(self, path: CapturePath, spool: Path, config: SpoolConfig) -> None:
        self._path, self._spool, self._config = path, spool, config
        self._wanted: list[int] | None = None
        self._capture: Capture | None = None

    def hooks(self) -> list[Hook]:
        return [
            Hook(SCHEDULER + "__init__", self.before_load, "before"),
            Hook(SCHEDULER + "__init__", self.after_load, "after"),
            Hook(SCHEDULER + "run_batch", self.after_batch, "after"),
            Hook(SCHEDULER + "get_internal_state", self.after_internal_state, "after"),
        ]

    def before_load(self, _scheduler: Any, args: Any, *_rest: object, **_named: object) -> None:
        """Refuse what arguments alone show, before a large model is loaded."""
        found = server_args(args)
        problems = [
            *argument_refusals(found),
            *self._path.refusals(found),
            *node_refusals(found, self._config),
        ]
        if writes_here(found):
            problems += spool_refusals(self._spool, self._config)
        if problems:
            raise Refused(problems)

    def on_model(self, runner: Any) -> None:
        """The target model is loaded: choose its aux layers."""
        layers = num_layers(runner.model_config)
        try:
            wanted = self._config.layers or _layers_of_flag(runner) or default_aux_layers(layers)
        except ProtocolError as error:
            raise Refused([str(error)]) from error
        self._wanted = list(set_layers(runner.model, wanted, layers))

    def after_load(self, _result: None, scheduler: Any, *_args: object, **_named: object) -> None:
        if self._wanted is None:
            raise Refused(["no target model was loaded by this scheduler"])
        self._capture = Capture.start(scheduler, self._path, self._spool, self._config, self._wanted)

    def after_batch(self, result: Any, scheduler: Any, batch: Any, *_args: object, **_named: object) -> None:
        if self._capture is not None:
            self._capture.on_batch(scheduler, batch, result)

    def after_internal_state(self, result: Any, _scheduler: Any, *_args: object, **_named: object) -> None:
        if self._capture is not None:
            result.internal_state["eagle3"] = capture_info(self._capture).to_dict()


def _layers_of_flag(runner: Any) -> tuple[int, ...]:
    """Layers named to SGLang itself (`--return-aux-hidden-state-layer-ids`, outputs), when the spool names none."""
    return tuple(sorted(server_args(runner.server_args).get("return_aux_hidden_state_layer_ids") or ()))
