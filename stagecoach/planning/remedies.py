"""What would make an engine fit that does not.

Owns the search over layouts and numbers of requests; each candidate is settled and counted as the
engine that was asked for.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from stagecoach.config.engine import EngineConfig, ResolvedConfig, option
from stagecoach.errors import ConfigError
from stagecoach.pipeline.stage import whole_model
from stagecoach.planning.footprint import Footprints
from stagecoach.planning.memory import engine_memory
from stagecoach.resolve import resolve

_TP_SIZES = (1, 2, 4, 8)
_MOST_GPUS = 128
_PP, _TP = option("pipeline_parallel_size"), option("tensor_parallel_size")


class Remedies:
    """Candidates beside one engine.

    Args:
        config: of the engine that does not fit.
        gpu_bytes: of each GPU.
    """

    def __init__(self, config: ResolvedConfig, gpu_bytes: int) -> None:
        self._config = config
        self._gpu_bytes = gpu_bytes
        # By ranks of a stage: all partitions of one model are sums of the same layers.
        self._by_ranks: dict[int, Footprints] = {}

    def find(self, counted: Iterable[str] = ()) -> tuple[str, ...]:
        """Options that would do, each by itself.

        Args:
            counted: options with values, as `--name=number`, that the pools' numbers suggest;
                kept where they do with all else counted anew.
        """
        engine = self._config.engine
        pp, tp = engine.pipeline_parallel_size, engine.tensor_parallel_size
        found = [text.replace("=", " ") for text in counted if self._does(text)]
        if engine.pp_partition is not None:
            balanced = resolve(replace(engine, pp_partition=None), self._config.device).partition
            if self._helps(replace(engine, pp_partition=balanced)):
                found.append(f"{option('pp_partition')} {','.join(map(str, balanced))}")
        if fewer := self._fewer_requests():
            found.append(f"{option('max_num_seqs')} {fewer}")
        # At some cost of precision.
        if self._helps(replace(engine, kv_cache_dtype="fp8")):
            found.append(f"{option('kv_cache_dtype')} fp8")
        if self._helps(replace(engine, online_quantization="ptpc_fp8")):
            found.append(f"{option('online_quantization')} ptpc_fp8")
        if tensor := self._first_layout((pp, size) for size in _TP_SIZES if size > tp):
            found.append(f"{_TP} {tensor[1]}")
        if stages := self._first_layout((size, tp) for size in self._stage_counts(tp) if size > pp):
            found.append(f"{_PP} {stages[0]}")
        layouts = sorted(
            ((size, tp_size) for tp_size in _TP_SIZES for size in self._stage_counts(tp_size)),
            # Of as many GPUs, fewer exchanges inside a stage.
            key=lambda layout: (layout[0] * layout[1], layout[1]),
        )
        smallest = self._first_layout(layouts)
        if smallest and smallest not in (tensor, stages):
            found.append(f"{_PP} {smallest[0]} {_TP} {smallest[1]}, the fewest GPUs")
        return tuple(found)

    def _stage_counts(self, tp_size: int) -> range:
        """Those over which the weights alone could be shared out."""
        try:
            config = resolve(self._one_stage(tp_size), self._config.device)
        except ConfigError:
            return range(0)
        weights = self._of_ranks(config).stage_bytes(whole_model(config.model.num_layers))
        least = -(-weights.total // self._gpu_bytes)
        return range(least, min(config.model.num_layers, _MOST_GPUS // tp_size) + 1)

    def _one_stage(self, tp_size: int) -> EngineConfig:
        return replace(
            self._config.engine,
            pipeline_parallel_size=1,
            tensor_parallel_size=tp_size,
            pp_partition=None,
        )

    def _of_ranks(self, config: ResolvedConfig) -> Footprints:
        tp_size = config.engine.tensor_parallel_size
        if tp_size not in self._by_ranks:
            self._by_ranks[tp_size] = Footprints(config)
        return self._by_ranks[tp_size]

    def _fewer_requests(self) -> int:
        """Most running requests that fit on this layout; 0 if not even one does."""
        low, high = 0, self._config.engine.max_num_seqs - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(replace(self._config.engine, max_num_seqs=middle)):
                low = middle
            else:
                high = middle - 1
        return low

    def _first_layout(self, layouts: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
        for num_stages, tp_size in layouts:
            engine = replace(self._one_stage(tp_size), pipeline_parallel_size=num_stages)
            if self._fits(engine):
                return num_stages, tp_size
        return None

    def _does(self, suggestion: str) -> bool:
        name, _, number = suggestion.partition("=")
        field = name.removeprefix("--").replace("-", "_")
        # The search for this one finds the most there is.
        if not number or field == "max_num_seqs":
            return False
        change: dict[str, Any] = {field: float(number) if "." in number else int(number)}
        return self._helps(replace(self._config.engine, **change))

    def _helps(self, changed: EngineConfig) -> bool:
        return changed != self._config.engine and self._fits(changed)

    def _fits(self, engine: EngineConfig) -> bool:
        try:
            config = resolve(engine, self._config.device)
        except ConfigError:
            return False  # the layout itself is refused
        # Weights of other types are counted anew.
        is_alike = config.quantization == self._config.quantization
        footprints = self._of_ranks(config) if is_alike else None
        return engine_memory(config, self._gpu_bytes, footprints).fits
