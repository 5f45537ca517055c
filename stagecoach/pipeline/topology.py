"""The grid of workers: pipeline stages × tensor-parallel ranks.

Owns the numbering. Global rank = stage * tensor_parallel_size + tensor rank, so that the
ranks of a stage are neighbours. Knows no process and no socket.
"""

from dataclasses import dataclass

from stagecoach.config.engine import EngineConfig


@dataclass(frozen=True, slots=True)
class WorkerId:
    """One place in the grid."""

    rank: int
    stage: int
    tp_rank: int

    @property
    def name(self) -> str:
        return f"worker[{self.stage},{self.tp_rank}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Shape of the grid."""

    num_stages: int
    tp_size: int

    @staticmethod
    def of(engine: EngineConfig) -> "Topology":
        return Topology(
            num_stages=engine.pipeline_parallel_size, tp_size=engine.tensor_parallel_size
        )

    @property
    def num_workers(self) -> int:
        return self.num_stages * self.tp_size

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return tuple(map(self.worker, range(self.num_workers)))

    @property
    def sampler_rank(self) -> int:
        """The worker that samples and replies: tensor rank 0 of the last stage."""
        return (self.num_stages - 1) * self.tp_size

    def worker(self, rank: int) -> WorkerId:
        return WorkerId(rank=rank, stage=rank // self.tp_size, tp_rank=rank % self.tp_size)

    def host_ranks(self, host: int, num_hosts: int) -> range:
        """Ranks on one of several hosts: whole stages, as evenly as they can be shared out."""
        first, end = (number * self.num_stages // num_hosts for number in (host, host + 1))
        return range(first * self.tp_size, end * self.tp_size)

    def stage_ranks(self, stage: int) -> range:
        return range(stage * self.tp_size, (stage + 1) * self.tp_size)
