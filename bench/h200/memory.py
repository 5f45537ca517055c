"""What `stagecoach plan` says of a GPU's memory beside what a worker takes.

Runs one worker as the engine does (weights, rehearsal, pools, graphs) without the engine around it,
with random weights at real widths; fewer layers and experts where it should be quick. Prints a line
a figure, and with --out writes a JSON part.

    python -m bench.h200.memory kimi-linear --max-num-seqs 256 --max-num-batched-tokens 8192
    python -m bench.h200.memory kimi-k3 --layers 5 --experts 32 --draft
"""

import argparse
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.h200 import shapes
from bench.h200.engine import add_formats
from bench.h200.parts import write_part
from stagecoach.config.engine import EngineConfig, ResolvedConfig, SpeculativeConfig
from stagecoach.observe import log
from stagecoach.pipeline.thread_links import ThreadMesh
from stagecoach.pipeline.topology import Topology
from stagecoach.planning.memory import divide, engine_memory, pool_bytes
from stagecoach.published import published_config
from stagecoach.resolve import resolve
from stagecoach.runner import stage_runner
from stagecoach.runner.stage_runner import StageRunner

_NAMES = {"kimi-linear": "kimi-linear-48b", "kimi-k3": "kimi-k3"}


def shortened(name: str, num_layers: int | None, num_experts: int | None) -> dict[str, Any]:
    """A published config, cut to its first layers and experts."""
    root = published_config(_NAMES[name])
    text = root.get("text_config", root)
    if num_layers is not None:
        text["num_hidden_layers"] = num_layers
        linear = text["linear_attn_config"]
        for key in ("full_attn_layers", "kda_layers"):
            linear[key] = [layer for layer in linear[key] if layer <= num_layers]
    if num_experts is not None:
        text["num_experts"] = num_experts
    return root


def measure(config: ResolvedConfig) -> dict[str, dict[str, int]]:
    """Bytes of each kind, planned and measured."""
    free, total = torch.cuda.mem_get_info()
    context = total - free
    device = torch.device("cuda", 0)
    topology = Topology.of(config.engine)
    worker = topology.worker(0)
    runner = StageRunner(config, worker, ThreadMesh(topology).links(worker, device))
    before = torch.cuda.memory_allocated()
    runner.load(lambda done, in_all: None)
    torch.cuda.synchronize()
    weights = torch.cuda.memory_allocated() - before
    seen: dict[str, int] = {}
    available_bytes = stage_runner.available_bytes

    def spy(config: Any, device: Any, measured: Any, num_sharing: int) -> Any:
        seen.update(activations=measured.activations, graphs=measured.graphs)
        # All that is neither weights nor what a step needs.
        seen["context"] = total - torch.cuda.mem_get_info()[0] - torch.cuda.memory_allocated()
        return available_bytes(config, device, measured, num_sharing)

    with patch.object(stage_runner, "available_bytes", spy):
        needs = runner.memory_needs()
    memory_plan = divide(config, [needs])
    before, free_before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    runner.allocate(memory_plan)
    torch.cuda.synchronize()
    # Graphs keep their pool beside pages and slots.
    pools_and_graphs = free_before - torch.cuda.mem_get_info()[0]
    planned = engine_memory(config, total)
    (rank,) = planned.ranks
    pools = pool_bytes(rank._replace(needs=needs), memory_plan)
    return {
        "total": {"planned": total, "measured": total},
        "first context": {"planned": 0, "measured": context},
        "weights": {"planned": rank.weights.total + rank.drafter, "measured": weights},
        "context": {"planned": rank.reserve.context, "measured": seen["context"]},
        "activations": {"planned": rank.reserve.activations, "measured": seen["activations"]},
        "graphs": {"planned": rank.reserve.graphs, "measured": seen["graphs"]},
        "available": {
            "planned": rank.needs.available_bytes,
            "measured": needs.available_bytes,
        },
        "a page": {"planned": rank.needs.bytes_per_page, "measured": needs.bytes_per_page},
        "a slot": {"planned": rank.needs.bytes_per_slot, "measured": needs.bytes_per_slot},
        "pools and graphs": {"planned": pools + seen["graphs"], "measured": pools_and_graphs},
        "in use": {
            "planned": rank.fixed_bytes + (pool_bytes(rank, planned.plan) if planned.plan else 0),
            "measured": total - torch.cuda.mem_get_info()[0],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=tuple(_NAMES))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int, default=8704)
    parser.add_argument("--draft", action="store_true", help="with a small draft of 7 tokens")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--max-state-checkpoints", type=int)
    add_formats(parser)
    parser.add_argument("--name", help="of the part, behind `memory-`; by default the shape")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    log.configure("memory", level="info")
    config = shortened(arguments.shape, arguments.layers, arguments.experts)
    speculative = None
    if arguments.draft:
        draft = shapes.write_folder(shapes.kimi_k3_draft(arguments.layers), is_draft=True)
        follows = arguments.online_quantization != "none"
        speculative = SpeculativeConfig(
            model=str(draft),
            online_quantization="follow" if follows else "none",
            kv_cache_dtype=arguments.kv_cache_dtype,
        )
    engine = EngineConfig(
        model=str(shapes.write_folder(config)),
        device="cuda",
        load_format="dummy",
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_model_len=arguments.max_model_len,
        enforce_eager=arguments.enforce_eager,
        mxfp4_experts=arguments.mxfp4_experts,
        online_quantization=arguments.online_quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
        max_state_checkpoints=arguments.max_state_checkpoints,
        speculative_config=speculative,
    )
    with torch.inference_mode():
        results = measure(resolve(engine))
    for name, both in results.items():
        planned, measured = both["planned"], both["measured"]
        ratio = planned / measured if measured else 0.0
        print(f"{name:18}{planned:16,} planned {measured:16,} measured {ratio:8.3f}")
    if arguments.out:
        name = arguments.name or arguments.shape + ("-draft" if arguments.draft else "")
        options = {
            option: str(value)
            for option, value in vars(arguments).items()
            if option not in ("name", "out")
        }
        write_part(arguments.out, f"memory-{name}", {"options": options, "bytes": results})


if __name__ == "__main__":
    main()
