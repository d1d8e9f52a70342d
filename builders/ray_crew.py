"""`--engine ray`: parts of a build as tasks of a Ray cluster, each beside its server where Ray has that machine.

A worker that dies is started again by Ray, elsewhere when its machine is gone, and its part goes on from its folder.
Nothing but JSON passes between driver and workers.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from eagle3_data.builders.fleet import build_fleet
from eagle3_data.builders.fleet_part import Outcome, PartJob, work_part
from eagle3_data.builders.settings import BuildConfig, BuildReport
from eagle3_data.errors import ConfigError
from eagle3_data.journal import Tick

if TYPE_CHECKING:
    from types import ModuleType

RESTARTS = 20
"""How often Ray may start a part's worker again."""


def build_on_ray(
    config: BuildConfig, *, on_tick: Callable[[Tick], None], on_text: Callable[[str], None]
) -> BuildReport:
    """The build over the cluster that RAY_ADDRESS names (or the running one, or a new one on this machine).

    `config.out` must be a folder that every machine of the cluster sees under this name. Raises ConfigError when Ray is
    not installed or not reachable, BuildFailed for parts that did not finish.
    """
    ray = _ray()
    return build_fleet(config, lambda: _crew(ray, on_text), on_tick=on_tick, on_text=on_text)


def run_part(job: str) -> str:
    """A Ray task."""
    return work_part(PartJob.from_json(job)).to_json()


def _ray() -> ModuleType:
    try:
        import ray
    except ImportError:
        raise ConfigError("--engine ray needs Ray", next="pip install 'eagle3-data[ray]', on every machine") from None
    module: ModuleType = ray
    return module


@contextlib.contextmanager
def _crew(ray: Any, on_text: Callable[[str], None]) -> Iterator[RayCrew]:
    """Workers of the cluster; one that is connected already stays so."""
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(log_to_driver=False, configure_logging=False)
        except Exception as error:  # Ray raises several kinds: no cluster, another version, no memory
            raise ConfigError(f"Ray does not start: {error}", next="ray status; RAY_ADDRESS names a cluster") from error
    try:
        crew = RayCrew(ray)
        on_text(f"Ray: {len(crew.nodes)} machines, {ray.cluster_resources().get('CPU', 0):.0f} CPUs")
        yield crew
    finally:
        if ours:
            ray.shutdown()


class RayCrew:
    """A `Crew` of Ray tasks."""

    def __init__(self, ray: Any) -> None:
        self._ray, self._refs = ray, dict[Any, int]()
        self.nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
        # one task per process: a build leaves signal handlers and mapped files to the end of its process
        self._task = ray.remote(num_cpus=1, max_calls=1, max_retries=RESTARTS)(run_part)

    def start(self, job: PartJob) -> None:
        strategy = self._place(job.servers[0])
        options = {"scheduling_strategy": strategy, "name": f"eagle3-data part {job.index}"}
        self._refs[self._task.options(**options).remote(job.to_json())] = job.index

    def ended(self, timeout_s: float) -> dict[int, Outcome]:
        done, _ = self._ray.wait(list(self._refs), timeout=timeout_s)
        return {self._refs.pop(ref): self._outcome(ref) for ref in done}

    def stop(self) -> None:
        for ref in self._refs:
            self._ray.cancel(ref)  # a KeyboardInterrupt in the worker: what Ctrl-C does to a build

    def abandon(self) -> None:
        for ref in self._refs:
            self._ray.cancel(ref, force=True)

    def _outcome(self, ref: Any) -> Outcome:
        try:
            return Outcome.from_json(self._ray.get(ref))
        except self._ray.exceptions.RayError as error:
            lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            cause = lines[-1] if isinstance(error, self._ray.exceptions.RayTaskError) else lines[0]
            return Outcome(
                error=f"its worker ended ({type(error).__name__}): {cause.strip()}",
                next="see the worker's log (ray logs), and memory and disk of its machine",
            )

    def _place(self, url: str) -> Any:
        """Beside the server: its spool is read there without the network. Anywhere when its machine is not Ray's."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        host = urlsplit(url).hostname or ""
        if _is_loopback(host):  # means this machine, and nothing else
            return NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=False)
        names = {host, *_addresses(host)}
        for node in self.nodes:
            if names & {node["NodeManagerAddress"], node["NodeManagerHostname"]}:
                return NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
        return "DEFAULT"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return set()
