"""One layer of each kind at its real size, as a captured graph, against the bytes it must move.

Layers of Kimi-Linear-48B and of Kimi-K3 (fewer experts, so that they fit), random weights; each
is replayed on windows of 1 token and of 8 (3 rows replayed), behind contexts of 4,096 tokens.
Bytes: the layer's weights (of the experts, those that were chosen), each state read and written,
each record, and the cached rows.

    python -m bench.h200.layers --out DIR
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.h200 import shapes
from bench.h200.parts import write_part
from bench.kernels.timing import graph_time_us, limit_us
from stagecoach.config.model import LayerKind, ModelConfig, parse_model_config
from stagecoach.kernels.ragged import StepTensors
from stagecoach.model.attn_residual import ResidualStream
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.parallel_linear import SingleRank
from stagecoach.model.stage_memory import StageMemory, memory_shapes
from stagecoach.model.weights import load_stage
from stagecoach.pipeline.stage import Stage
from tests.packed_group import make_packed_group

CONTEXT_TOKENS = 4096
PAGE_SIZE = 64
NUM_DRAFTS = 7
NUM_REPLAYED = 3
# The first of each kind behind the dense layer.
LAYERS = {
    "kimi-linear": (shapes.kimi_linear_48b, (0, 1, 3)),
    "kimi-k3": (shapes.kimi_k3_slice, (0, 1, 3)),
}


def one_layer(config: ModelConfig, layer: int) -> StageModel:
    """A stage of that layer alone."""
    num_stages = 3
    index = 0 if layer == 0 else 1
    stage = Stage(index=index, num_stages=num_stages, start=layer, end=layer + 1)
    return load_stage(
        Path(),
        config,
        stage,
        SingleRank(),
        torch.bfloat16,
        dummy_seed=0,
        device="cuda",
    )


def make_step(num_requests: int, length: int) -> StepTensors:
    replay = NUM_REPLAYED if length > 1 else 0
    num_pages = CONTEXT_TOKENS // PAGE_SIZE + 1
    pair = make_packed_group(
        [length] * num_requests,
        starts=[CONTEXT_TOKENS - length] * num_requests,
        replay=[replay] * num_requests,
        num_drafts=[length - 1] * num_requests,
        page_tables=[
            list(range(1 + index * num_pages, 1 + (index + 1) * num_pages))
            for index in range(num_requests)
        ],
        device="cuda",
        block_size=PAGE_SIZE,
    )
    num_tokens = num_requests * length
    return StepTensors(
        num_tokens=num_tokens,
        token_ids_T=torch.zeros(num_tokens, dtype=torch.int32, device="cuda"),
        cache_rows_T=pair.cache_rows_T,
        windows=(pair.packed,),
        chunks=(),
        positions_T=torch.arange(num_tokens, dtype=torch.int32, device="cuda"),
        num_real_1=torch.tensor([num_tokens], dtype=torch.int32, device="cuda"),
    )


def moved_bytes(
    model: StageModel, config: ModelConfig, layer: int, num_requests: int, length: int
) -> float:
    """The fewest bytes of one step of the layer."""
    num_bytes = float(model.num_parameter_bytes)
    if layer == 0:  # of the embedding a few rows are read
        num_bytes -= config.vocab_size * config.hidden_size * 2
    if config.is_moe_layer[layer]:
        moe = config.moe
        assert moe is not None
        width = moe.latent_size or config.hidden_size
        expert = 3 * width * moe.intermediate_size * 2
        seen = shapes.distinct_experts(
            num_requests * length, moe.num_experts, moe.num_experts_per_token
        )
        num_bytes -= (moe.num_experts - seen) * expert
    if config.layer_kinds[layer] is LayerKind.KDA:
        kda = config.kda
        state = kda.num_heads * kda.head_dim**2 * 4
        record = kda.num_heads * 3 * kda.head_dim * 4
        recorded = (NUM_REPLAYED + length - 1) if length > 1 else 0
        num_bytes += num_requests * (2 * state + recorded * record)
    else:
        num_bytes += num_requests * CONTEXT_TOKENS * config.mla.cache_row_width * 2
    return num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, (make_config, layers) in LAYERS.items():
        config = parse_model_config(make_config())
        for layer in layers:
            with torch.inference_mode():
                rows += measure_layer(name, config, layer)
            torch.cuda.empty_cache()
    if arguments.out:
        write_part(arguments.out, "layers", {"rows": rows})


def measure_layer(name: str, config: ModelConfig, layer: int) -> list[dict[str, Any]]:
    model = one_layer(config, layer)
    attention = config.layer_kinds[layer].name
    kind = f"{attention} + {'MoE' if config.is_moe_layer[layer] else 'dense'}"
    rows = []
    for num_requests, length in ((1, 1), (8, 1), (64, 1), (1, 8), (16, 8)):
        step = make_step(num_requests, length)
        memory = memory_shapes(config, model.stage, 1, torch.bfloat16, NUM_DRAFTS).allocate(
            num_requests + 1, (num_requests + 1) * (CONTEXT_TOKENS + 2 * PAGE_SIZE), "cuda"
        )
        num_blocks = config.num_closed_blocks(layer)
        hidden_TH = torch.randn(
            step.num_tokens, config.hidden_size, dtype=torch.bfloat16, device="cuda"
        )
        bank_TBH = hidden_TH.unsqueeze(1).repeat(1, num_blocks, 1)

        def run(
            hidden_TH: Tensor = hidden_TH,
            bank_TBH: Tensor = bank_TBH,
            step: StepTensors = step,
            memory: StageMemory = memory,
        ) -> Tensor:
            stream = ResidualStream(hidden_TH, bank_TBH, model.bank_capacity)
            return model.forward(stream, step, memory).partial_TH

        microseconds = graph_time_us(run, iterations=5)
        limit = limit_us(moved_bytes(model, config, layer, num_requests, length))
        rows.append(
            {
                "model": name,
                "layer": kind,
                "requests": num_requests,
                "tokens": length,
                "us": microseconds,
                "limit us": limit,
                "of limit": limit / microseconds,
            }
        )
        print(
            f"{name:12s} {kind:12s} {num_requests:3d} x {length} {microseconds:8.1f} us "
            f"limit {limit:7.1f} ({limit / microseconds:.0%})",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main()
