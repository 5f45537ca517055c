"""The last stage on a GPU: the drafter and the choice of tokens, against the CPU and the limit.

    python -m bench.kernels.drafter check|time

Dimensions: N blocks, K drafts of each, V vocabulary, T tokens.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.kernels.timing import (
    Report,
    graph_time_us,
    limit_us,
    relative_error,
    run_command,
)
from stagecoach.config.draft import (
    DraftConfig,
    DraftMlaConfig,
    load_draft_config,
    parse_draft_config,
)
from stagecoach.draft.drafter import DSparkDrafter
from stagecoach.draft.load import fill_draft
from stagecoach.draft.model import DraftModel
from stagecoach.draft.tiny import write_tiny_draft
from stagecoach.kernels.linear import float32_sums
from stagecoach.kernels.ragged import PackedBlocks, StepTensors
from stagecoach.kernels.sampling import SamplingRows, choose_tokens
from stagecoach.model.parallel_linear import SingleRank
from tests.cpu.draft.draft_runs import HIDDEN, Stage, greedy, make_requests, target_tables
from tests.cpu.draft.packed_runs import (
    ANCHORS,
    CONFIGS,
    LENGTHS,
    SHAPE,
    packed_blocks,
    packed_step,
)
from tests.cpu.draft.published import GQA_CONFIG, MLA_CONFIG
from tests.cpu.runner.window_runs import (
    NOT_SIMPLE,
    SIMPLE,
    Decoder,
    PackedRun,
    all_drafts,
    outcome,
    ragged,
)

NUM_DRAFTS = 7
CONTEXT = 8192
PAGE_SIZE = 64


def check(report: Report) -> None:
    check_last_stage(report)
    check_drafter(report)


def check_last_stage(report: Report) -> None:
    """Requests decoded on both devices from equal float32 logits: the same tokens and rows."""
    no_logprobs = [item for item in NOT_SIMPLE if "logprobs" not in item]
    cases: dict[str, dict[str, Any]] = {
        "simple, no drafter": {"params": SIMPLE, "error": None},
        "simple, drafts": {"params": SIMPLE, "error": 0.3},
        "every parameter": {"params": SIMPLE + no_logprobs, "error": 0.3},
        "rejection": {"params": SIMPLE + no_logprobs, "error": 0.3, "acceptance": "rejection"},
        "forced 3.84": {"params": SIMPLE, "error": 0.5, "synthetic": 3.84},
        "logprobs": {
            "params": [{"temperature": 0.0, "logprobs": 3}, {"temperature": 0.9, "logprobs": 0}],
            "error": 0.3,
        },
    }
    for name, case in cases.items():
        for schedule in (all_drafts, ragged):
            ours, theirs = (
                outcome(
                    schedule=schedule,
                    run=PackedRun(device),
                    device=device,
                    dtype=torch.float32,
                    num_tokens=12,
                    **case,
                )
                for device in ("cuda", "cpu")
            )
            num_wrong = sum(map(_differ, ours, theirs))
            report.check(f"last stage, {name}, {schedule.__name__}", num_wrong, 0)


def _differ(one: Decoder, other: Decoder) -> bool:
    """Log-probabilities are summed in another order on a GPU."""
    return (
        one.token_ids != other.token_ids
        or one.rows != other.rows
        or len(one.logprobs) != len(other.logprobs)
        or any(
            entry.token_id != expected.token_id
            or entry.rank != expected.rank
            or entry.top_ids != expected.top_ids
            or abs(entry.logprob - expected.logprob) > 1e-5
            for entry, expected in zip(one.logprobs, other.logprobs, strict=True)
        )
    )


@torch.inference_mode()
def check_drafter(report: Report) -> None:
    """Rows and proposals of small drafts; captured, they are those of the eager run."""
    for name, config in CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_tiny_draft(Path(folder), config, seed=1)
            for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
                _check_draft(report, f"draft {name} {str(dtype)[6:]}", folder, dtype, tolerance)


def _check_draft(
    report: Report, name: str, folder: str, dtype: torch.dtype, tolerance: float
) -> None:
    requests = make_requests(LENGTHS, len(SHAPE.taps))
    theirs = Stage.read(Path(folder), torch.float32, num_draft_tokens=NUM_DRAFTS)
    theirs.write_all(requests)
    margins: list[Tensor] = []

    def watched(place: int, logits_NV: Tensor, drafts_NJ: Tensor) -> Tensor:
        best = logits_NV.topk(2).values
        margins.append(best[:, 0] - best[:, 1])
        return greedy(place, logits_NV, drafts_NJ)

    expected = theirs.propose(requests, ANCHORS, watched)
    drafter = _small_drafter(Path(folder), dtype)
    cache = torch.full(theirs.caches[0].shape, torch.nan, dtype=dtype, device="cuda")
    taps_TNH = torch.cat([request.taps for request in requests]).to("cuda", dtype)
    idle_TNH = torch.full((2, len(SHAPE.taps), HIDDEN), torch.nan, dtype=dtype, device="cuda")
    taps_TNH = torch.cat((taps_TNH, idle_TNH))
    step, blocks = packed_step(requests, 2, "cuda"), packed_blocks(requests, 1, "cuda")

    def propose() -> Tensor:
        drafter.write_context(taps_TNH, step, cache)
        proposal = drafter.propose(blocks, cache, greedy)
        assert proposal is not None and proposal.confidences_NK is not None
        return torch.cat((proposal.token_ids_NK.float(), proposal.confidences_NK), dim=1)

    eager = propose()[: len(LENGTHS)].clone()
    is_written = ~theirs.caches[0].isnan()
    is_written[:, :4] = False  # the null page: nobody writes it
    ours = cache.cpu().float()
    report.check(
        f"{name}, rows",
        relative_error(ours[is_written], theirs.caches[0][is_written]),
        tolerance,
    )
    report.check(f"{name}, elsewhere", float(not ours[~is_written].isnan().all()), 0)
    ids_NK, confidences_NK = eager.cpu().split(NUM_DRAFTS, dim=1)
    # A draft depends on those before it: all count up to the first that might be another.
    is_sure_NK = torch.stack(margins, dim=1) > (0.5 if dtype == torch.bfloat16 else 1e-3)
    is_sure_NK = is_sure_NK.cumprod(1).bool()
    is_wrong_NK = is_sure_NK & (ids_NK.long() != expected.token_ids_NK)
    report.check(f"{name}, {int(is_sure_NK.sum())} sure drafts", float(is_wrong_NK.sum()), 0)
    assert expected.confidences_NK is not None
    report.check(
        f"{name}, confidence",
        relative_error(confidences_NK[:, 0], expected.confidences_NK[:, 0]),
        tolerance,
    )
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = propose()
    cache.fill_(torch.nan)
    captured.zero_()
    graph.replay()
    is_same = torch.equal(captured[: len(LENGTHS)], eager)
    report.check(f"{name}, captured", float(not is_same), 0)


def _small_drafter(folder: Path, dtype: torch.dtype) -> DSparkDrafter:
    model = DraftModel(load_draft_config(folder), SingleRank(), dtype, "cuda")
    fill_draft(model, folder)
    embedding_VH, head_VH = (table.to("cuda", dtype) for table in target_tables())
    return DSparkDrafter(
        model,
        lambda token_ids: embedding_VH[token_ids],
        lambda hidden_RH: (hidden_RH @ head_VH.t()).float(),
        NUM_DRAFTS,
    )


class _Timed(NamedTuple):
    """A draft of published size with random weights, bfloat16."""

    config: DraftConfig
    drafter: DSparkDrafter
    head_bytes: int


@torch.inference_mode()
def time(report: Report) -> None:
    for name, config in (("mla", MLA_CONFIG), ("gqa", GQA_CONFIG)):
        timed = _published_drafter(parse_draft_config(config))
        for num_blocks in (1, 16, 64):
            _time_draft(report, f"{name} N {num_blocks}", timed, num_blocks)
        del timed
        torch.cuda.empty_cache()


def _published_drafter(config: DraftConfig) -> _Timed:
    model = DraftModel(config, SingleRank(), torch.bfloat16, "cuda")
    for slot in model.slots:
        slot.target.normal_(0.0, 0.02)
    embedding_VH, head_VH = (
        torch.empty(
            config.vocab_size, config.hidden_size, dtype=torch.bfloat16, device="cuda"
        ).normal_(0.0, 0.02)
        for _ in range(2)
    )
    drafter = DSparkDrafter(
        model,
        lambda token_ids: embedding_VH[token_ids],
        lambda hidden_RH: float32_sums(hidden_RH, head_VH)[0],
        NUM_DRAFTS,
    )
    return _Timed(config, drafter, head_VH.nbytes)


def _time_draft(report: Report, name: str, timed: _Timed, num_blocks: int) -> None:
    config, drafter = timed.config, timed.drafter
    num_pages = CONTEXT // PAGE_SIZE
    width = config.cache_row_width(1)
    shape = (config.num_layers, (1 + num_blocks * num_pages) * PAGE_SIZE, width)
    cache_YRD = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    int32 = partial(torch.tensor, dtype=torch.int32, device="cuda")
    ones = [1] * num_blocks
    blocks = PackedBlocks(
        num_blocks=num_blocks,
        max_context=CONTEXT,
        anchor_ids_N=int32(ones),
        starts_N=int32([CONTEXT - 40] * num_blocks),
        is_real_N=int32(ones),
        first_pages_N=int32([num_pages * block for block in range(num_blocks)]),
        pages_P=torch.arange(1, 1 + num_blocks * num_pages, dtype=torch.int32, device="cuda"),
        block_size=PAGE_SIZE,
    )
    num_tokens = num_blocks * (1 + NUM_DRAFTS)
    num_taps = len(config.taps.layers)
    taps_TNH = torch.randn(
        num_tokens, num_taps, config.hidden_size, dtype=torch.bfloat16, device="cuda"
    )
    rows_T = PAGE_SIZE + torch.arange(num_tokens, dtype=torch.int32, device="cuda")
    step = StepTensors(num_tokens, rows_T, rows_T, (), (), rows_T, int32([num_tokens]))
    seeds_N = torch.arange(num_blocks, device="cuda")

    def choose(temperature: float, place: int, logits_NV: Tensor, drafts_NJ: Tensor) -> Tensor:
        temperatures_N = torch.full((num_blocks,), temperature, device="cuda")
        rows_B = torch.arange(num_blocks, dtype=torch.int32, device="cuda")
        rows = SamplingRows(rows_B, None, blocks.starts_N, 1 + place, temperatures_N, seeds_N)
        return choose_tokens(logits_NV, rows).token_ids_T

    layer_bytes = drafter.num_parameter_bytes - 2 * config.vocab_size * config.markov_rank * 2
    context_bytes = config.num_layers * num_blocks * CONTEXT * width * 2
    markov_bytes = NUM_DRAFTS * config.vocab_size * (config.markov_rank * 2 + 8 * num_blocks)
    pass_bytes = layer_bytes + context_bytes + timed.head_bytes
    num_rows = num_blocks * NUM_DRAFTS
    # A product for each value of a matrix and row; weights are of two bytes.
    pass_flops = num_rows * (layer_bytes + timed.head_bytes + _attention_flops(config))
    calls: dict[str, tuple[Callable[[], object], int | None]] = {
        "context": (partial(drafter.write_context, taps_TNH, step, cache_YRD), None),
        "block pass": (partial(drafter.propose, blocks, cache_YRD, None), pass_bytes),
        "greedy": (
            partial(drafter.propose, blocks, cache_YRD, partial(choose, 0.0)),
            pass_bytes + markov_bytes,
        ),
        "random": (
            partial(drafter.propose, blocks, cache_YRD, partial(choose, 1.0)),
            pass_bytes + markov_bytes,
        ),
    }
    for label, (call, num_bytes) in calls.items():
        microseconds = graph_time_us(call, iterations=4, repeats=3)
        limit = None if num_bytes is None else limit_us(num_bytes, pass_flops)
        report.time(f"draft {name} {label}", microseconds, limit)


def _attention_flops(config: DraftConfig) -> int:
    """Of one row of a block, over its context, in all layers."""
    attention = config.attention
    if isinstance(attention, DraftMlaConfig):
        width = attention.cache_row_width + attention.kv_lora_rank
    else:
        width = 2 * attention.head_dim
    return config.num_layers * 2 * attention.num_heads * CONTEXT * width


if __name__ == "__main__":
    sys.exit(run_command("drafter", __doc__, {"check": check, "time": time}))
