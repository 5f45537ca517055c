"""Members as actors: what is asked of Ray, told by a stand-in whose actors are threads.

A real cluster is asked in tests/e2e/test_launchers.py.
"""

import dataclasses
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagecoach.config.engine import EngineConfig, ResolvedConfig
from stagecoach.engine.hosts import ray_cluster
from stagecoach.engine.hosts.head import Head
from stagecoach.engine.hosts.launchers import meeting_of, own_meeting
from stagecoach.errors import CheckpointError, ConfigError, RendezvousError
from tests.cpu.engine.fakes import resolved
from tests.cpu.engine.hosts.party import LIMIT_SECONDS, Call, Party, gather

pytestmark = pytest.mark.cpu


class RayError(Exception):
    """As Ray's own base class."""


class Group:
    def __init__(self, bundles: list[dict[str, float]], has_place: bool) -> None:
        self.bundles = bundles
        self._has_place = has_place

    def wait(self, timeout_seconds: float) -> bool:
        return self._has_place


class Cluster(types.ModuleType):
    """In the place of the module `ray`, with two nodes."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.has_place = self.is_there = True
        self.groups: list[Group] = []
        self.options: list[dict[str, Any]] = []
        self.killed: list[object] = []
        self.removed: list[Group] = []
        self.dies: RayError | None = None
        self._is_joined = False
        self.exceptions = types.SimpleNamespace(RayError=RayError)
        self.util = types.SimpleNamespace(
            get_node_ip_address=lambda: "127.0.0.1",
            placement_group=self._make_group,
            # The second bundle lies on the first node.
            placement_group_table=lambda group: {"bundles_to_node_id": {0: "b", 1: "a"}},
            remove_placement_group=self.removed.append,
        )

    def is_initialized(self) -> bool:
        return self._is_joined

    def init(self, address: str, logging_level: str) -> None:
        if not self.is_there:
            raise ConnectionError("Could not find any running Ray instance.\nMore lines.")
        self._is_joined = True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 3.0}

    available_resources = cluster_resources

    def get_runtime_context(self) -> Any:
        return types.SimpleNamespace(get_node_id=lambda: "a")

    def _make_group(self, bundles: list[dict[str, float]], strategy: str) -> Group:
        assert strategy == "PACK"
        self.groups.append(Group(bundles, self.has_place))
        return self.groups[-1]

    def remote(self, **options: Any) -> Callable[[type], Any]:
        self.options.append(options)

        def actor_of(kind: type) -> Any:
            instance = kind()

            def run(*arguments: object) -> Call:
                return Call(self._die if self.dies else instance.run, *arguments)

            method = types.SimpleNamespace(remote=run)
            return types.SimpleNamespace(remote=lambda: types.SimpleNamespace(run=method))

        return actor_of

    def _die(self, *arguments: object) -> None:
        assert self.dies is not None
        raise self.dies

    def get(self, running: Call) -> None:
        try:
            running.result()
        except RayError:
            raise
        except Exception as error:
            raise RayError(f"Traceback\n{type(error).__name__}: {error}") from error

    def kill(self, actor: object) -> None:
        self.killed.append(actor)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    strategies = types.ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = types.SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", cluster)
    monkeypatch.setitem(sys.modules, "ray.util", types.ModuleType("ray.util"))
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)

    def resolve(engine: EngineConfig) -> ResolvedConfig:
        return dataclasses.replace(_config(), engine=engine)

    monkeypatch.setattr(ray_cluster, "resolve", resolve)
    return cluster


def _config(**options: Any) -> ResolvedConfig:
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    return resolved(**sizes, launcher="ray", distributed_timeout_seconds=5, **options)


def _head(party: Party, config: ResolvedConfig) -> Head:
    meeting = meeting_of(config)
    assert meeting is not None
    fields = {item.name: getattr(meeting, item.name) for item in dataclasses.fields(meeting)}
    return party.head(config, **fields)


def test_an_actor_runs_the_ranks_of_each_stage(party: Party, cluster: Cluster) -> None:
    """Stages go to bundles in the order of their nodes; the server holds no rank."""
    config = _config()
    assert own_meeting(config.engine) is None
    head = _head(party, config)
    contact = gather(head).result()
    started = sorted(party.started.get(timeout=LIMIT_SECONDS)[0] for _ in range(4))
    assert head.ranks == () and started == [0, 1, 2, 3]
    # This cluster says of both actors that they are on one node.
    assert contact.hosts == (0, 0, 0, 0)
    assert cluster.groups[0].bundles == [{"CPU": 2.0}] * 2
    indices = [item["scheduling_strategy"].placement_group_bundle_index for item in cluster.options]
    assert indices == [1, 0]
    assert [(item["num_cpus"], item["num_gpus"]) for item in cluster.options] == [(2.0, 0.0)] * 2
    head.end("enough", in_order=True)
    assert len(cluster.killed) == 2 and cluster.removed == cluster.groups
    assert party.news.empty()


def test_on_gpus_a_bundle_has_one_for_each_rank(party: Party, cluster: Cluster) -> None:
    config = dataclasses.replace(_config(), device="cuda")
    head = _head(party, config)
    # On the actors' side nothing is settled to cuda, which ends it here.
    with pytest.raises(RendezvousError, match="stage actor"):
        gather(head).result()
    assert cluster.groups[0].bundles == [{"CPU": 1.0, "GPU": 2.0}] * 2
    assert {item["num_gpus"] for item in cluster.options} == {2.0}


def test_without_a_place_it_is_said_what_there_is(party: Party, cluster: Cluster) -> None:
    cluster.has_place = False
    with pytest.raises(
        RendezvousError,
        match=r"no place for 2 bundles of \{'CPU': 2\.0\} within 5 s .* has 3 CPU, 0 GPU, free",
    ):
        gather(_head(party, _config())).result()
    assert cluster.removed == cluster.groups and not cluster.options


def test_an_actor_that_cannot_load_says_why(
    party: Party, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(engine: EngineConfig) -> ResolvedConfig:
        raise CheckpointError("/models/k3: no config.json")

    monkeypatch.setattr(ray_cluster, "resolve", resolve)
    # By itself, or by who watches it.
    text = r"stage actor \d \(.*\): (CheckpointError: )?/models/k3: no config\.json"
    with pytest.raises(RendezvousError, match=text):
        gather(_head(party, _config())).result()


def test_an_actor_shows_the_key_of_its_own_node(
    party: Party, cluster: Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"0123456789abcdef")
    head = _head(party, _config(host_key_file=str(path)))
    gather(head).result()
    head.end("enough", in_order=True)
    head = _head(party, _config(host_key_file=str(path)))
    path.unlink()
    # The actors' nodes have none, which who watches them tells with the server's.
    with pytest.raises(RendezvousError, match=r"stage actor \d .*: --host-key-file=.*No such file"):
        gather(head).result()


def test_an_actor_that_dies_is_told_for_it(party: Party, cluster: Cluster) -> None:
    cluster.dies = RayError("The actor died.\nThe node was lost.")
    with pytest.raises(RendezvousError, match=r"stage actor \d \(.*\): The node was lost\."):
        gather(_head(party, _config())).result()


def test_without_ray_or_a_cluster_nothing_begins(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.is_there = False
    with pytest.raises(ConfigError, match="no Ray cluster is found: Could not find any running"):
        meeting_of(_config())
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"Ray is not installed; `pip install stagecoach\[ray\]`"):
        meeting_of(_config())
