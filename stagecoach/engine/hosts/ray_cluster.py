"""Members as actors on the nodes of a Ray cluster, one for each pipeline stage.

Owns the placement group, whose bundles each hold the ranks of a stage on one node, and the actors
in it. The process that serves is the head, with no ranks of its own; beside starting and ending
actors, Ray carries nothing.
"""

import dataclasses
import importlib
import socket
import threading
from typing import Any

from stagecoach.config.engine import EngineConfig, ResolvedConfig, option
from stagecoach.engine.hosts.handshake import read_host_key
from stagecoach.engine.hosts.meeting import HeadAddress, Meeting
from stagecoach.engine.hosts.member import run_member, withdraw
from stagecoach.errors import ConfigError, RendezvousError, StagecoachError
from stagecoach.pipeline.topology import Topology
from stagecoach.resolve import resolve

_NOUN = "stage actor"


def meeting_on_ray(config: ResolvedConfig) -> Meeting:
    """The meeting of this process, which serves, and of an actor for each stage.

    Raises:
        ConfigError: Ray is not installed, no cluster runs, or the key that all share cannot be
            read.
    """
    ray = _import_ray()
    secret = read_host_key(config.engine.host_key_file)
    if not ray.is_initialized():
        try:
            ray.init(address="auto", logging_level="warning")
        except ConnectionError as error:
            raise ConfigError(
                f"{option('launcher')}=ray: no Ray cluster is found: {_first_line(error)}; "
                "`ray start --head` begins one, RAY_ADDRESS names another"
            ) from None
    troupe = _Troupe(ray, config, secret)
    return Meeting(
        member=0,
        noun=_NOUN,
        ranks=_ranks(config.engine),
        master=str(ray.util.get_node_ip_address()),
        port=None,
        publish=troupe.recruit,
        release=troupe.release,
        secret=secret,
    )


def run_actor(engine: EngineConfig, number: int, head: HeadAddress, node: str) -> None:
    """What runs in an actor: the ranks of one stage, until the engine ends.

    Args:
        number: the stage + 1, since the head is member 0.
        node: which node of the cluster this is.

    Raises:
        StagecoachError: why it ended; the head is told.
    """
    own = Meeting(
        member=number,
        noun=_NOUN,
        ranks=_ranks(engine),
        master=head.address,
        port=head.port,
        host_key=node,
        secret=read_host_key(engine.host_key_file),
    )
    try:
        config = resolve(engine)
    except StagecoachError as error:
        withdraw(own, error)
        raise
    run_member(config, own)


class _Troupe:
    """The actors of one engine and the placement group that they are in."""

    def __init__(self, ray: Any, config: ResolvedConfig, secret: bytes | None) -> None:
        self._ray = ray
        self._config = config
        self._secret = secret
        self._group: Any = None
        self._actors: list[Any] = []
        self._lock = threading.Lock()
        self._is_released = threading.Event()

    def recruit(self, head: HeadAddress) -> None:
        """Start an actor for each stage, which comes to the head by itself.

        Raises:
            RendezvousError: the cluster has no place for them within the time.
        """
        engine, ray = self._config.engine, self._ray
        bundle: dict[str, float] = {"CPU": float(engine.tensor_parallel_size)}
        if self._config.device == "cuda":
            bundle = {"CPU": 1.0, "GPU": float(engine.tensor_parallel_size)}
        num_stages = engine.pipeline_parallel_size
        with self._lock:
            if self._is_released.is_set():
                return
            self._group = ray.util.placement_group([bundle] * num_stages, strategy="PACK")
        seconds = engine.distributed_timeout_seconds
        if not self._group.wait(timeout_seconds=seconds):
            raise RendezvousError(
                f"{option('launcher')}=ray: no place for {num_stages} bundles of {bundle} within "
                f"{seconds} s ({option('distributed_timeout_seconds')}); the cluster has "
                f"{_resources(ray.cluster_resources())}, free are "
                f"{_resources(ray.available_resources())}"
            )
        with self._lock:
            if self._is_released.is_set():
                return
            for stage, index in enumerate(self._bundles_by_node(num_stages)):
                self._start(stage + 1, index, bundle, head)

    def release(self) -> None:
        """End the actors and give back their places; from any thread, more than once."""
        with self._lock:
            self._is_released.set()
            actors, self._actors = self._actors, []
            group, self._group = self._group, None
        for actor in actors:
            self._ray.kill(actor)
        if group is not None:
            self._ray.util.remove_placement_group(group)

    def _bundles_by_node(self, num_bundles: int) -> list[int]:
        """Bundles in an order that leaves neighbouring stages on one node where it can."""
        table = self._ray.util.placement_group_table(self._group)
        nodes = table.get("bundles_to_node_id", {})
        return sorted(range(num_bundles), key=lambda index: (str(nodes.get(index, "")), index))

    def _start(self, number: int, index: int, bundle: dict[str, float], head: HeadAddress) -> None:
        ray = self._ray
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        actor_class = ray.remote(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0.0),
            max_restarts=0,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=index
            ),
        )(StageActor)
        actor = actor_class.remote()
        self._actors.append(actor)
        # On every node what is open is the same as here.
        engine = dataclasses.replace(self._config.engine, device=self._config.device)
        running = actor.run.remote(engine, number, tuple(head))
        threading.Thread(
            target=self._watch, args=(running, number, head), name=f"actor {number}", daemon=True
        ).start()

    def _watch(self, running: Any, number: int, head: HeadAddress) -> None:
        """An actor that ends before it could say so itself: the head hears it from here."""
        try:
            self._ray.get(running)
        except self._ray.exceptions.RayError as error:
            if self._is_released.is_set():
                return
            place = Meeting(
                member=number,
                noun=_NOUN,
                ranks=(),
                master=head.address,
                port=head.port,
                secret=self._secret,
            )
            withdraw(place, RendezvousError(_last_line(error)))


class StageActor:
    """Runs in a process of Ray's, on the node of its bundle."""

    def run(self, engine: EngineConfig, number: int, head: tuple[str, int]) -> None:
        """As `run_actor`."""
        ray = _import_ray()
        node = ray.get_runtime_context().get_node_id() or socket.gethostname()
        run_actor(engine, number, HeadAddress(*head), str(node))


def _ranks(engine: EngineConfig) -> tuple[tuple[int, ...], ...]:
    """The head's, which has none, then those of each stage."""
    topology = Topology.of(engine)
    return ((), *(tuple(topology.stage_ranks(stage)) for stage in range(topology.num_stages)))


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ConfigError(
            f"{option('launcher')}=ray: Ray is not installed; `pip install stagecoach[ray]` "
            "brings it"
        ) from None


def _resources(amounts: dict[str, float]) -> str:
    return ", ".join(f"{amounts.get(name, 0.0):g} {name}" for name in ("CPU", "GPU"))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), repr(error))


def _last_line(error: Exception) -> str:
    """Of a remote traceback it says what was raised."""
    return next(iter(reversed(str(error).strip().splitlines())), repr(error))
