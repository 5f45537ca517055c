"""Any split over stages and ranks computes what one rank computes, in float64 to 1e-9."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.config.model import load_model_config
from stagecoach.model.parallel_linear import SingleRank
from stagecoach.model.stage_memory import memory_shapes
from stagecoach.model.tiny import TinyShape, kimi_k3_config, kimi_linear_config
from stagecoach.model.weights import load_stage
from stagecoach.pipeline.stage import whole_model
from tests.cpu.model.model_runs import Grid, Part, Row, step_tensors

pytestmark = pytest.mark.cpu

TOKEN_IDS = torch.randint(0, 300, (23,), generator=torch.Generator().manual_seed(3)).tolist()


def traffic(grid: Grid) -> Tensor:
    """Logits of a chunked prompt, decoding beside a second prompt, and a window of three."""
    first, second = grid.row(40), grid.row(40)
    return torch.cat(
        [
            grid.prefill(first, TOKEN_IDS, chunk=9),
            grid.decode(first, [5]),
            grid.step([Part(first, [7], is_window=True), Part(second, TOKEN_IDS[:11])]),
            grid.step([Part(second, [1, 2, 3], is_window=True), Part(first, [4, 4])]),
        ]
    )


@cache
def unsplit(folder: Path, load_format: str = "auto") -> Tensor:
    return traffic(Grid(folder, torch.float64, load_format=load_format))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize(
    "partition", [(9,), (5, 4), (4, 5), (3, 3, 3), (1, 2, 3, 3), (4, 1, 3, 1)], ids=str
)
def test_kimi_k3(k3_folder: Path, partition: tuple[int, ...], tp_size: int) -> None:
    logits = traffic(Grid(k3_folder, torch.float64, partition, tp_size))
    torch.testing.assert_close(logits, unsplit(k3_folder), rtol=0, atol=1e-9)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("partition", [(4,), (1, 3), (1, 1, 1, 1)], ids=str)
def test_dummy_weights_are_the_same_for_every_split(
    write_model: Callable[[dict[str, Any]], Path], partition: tuple[int, ...], tp_size: int
) -> None:
    folder = dummy_folder(write_model)
    logits = traffic(Grid(folder, torch.float64, partition, tp_size, load_format="dummy"))
    expected = unsplit(folder, "dummy")
    assert expected.std() > 1e-3
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)


@cache
def dummy_folder(write_model: Callable[[dict[str, Any]], Path]) -> Path:
    shape = TinyShape(num_layers=4, mla_layers=(1, 3), block_size=2)
    return write_model(kimi_k3_config(shape))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (kimi_linear_config, {}),
        (kimi_k3_config, {"is_head_tied": True}),
        (kimi_k3_config, {"num_shared_experts": 0}),
        (kimi_k3_config, {"num_shared_experts": 0, "latent_size": None}),
    ],
    ids=["Kimi-Linear", "tied head", "no shared expert", "routed experts at full width alone"],
)
def test_other_models_and_a_vocabulary_that_the_ranks_do_not_divide(
    write_model: Callable[[dict[str, Any]], Path],
    family: Callable[[TinyShape], dict[str, Any]],
    changes: dict[str, Any],
) -> None:
    sizes = {"num_layers": 3, "mla_layers": (1,), "vocab_size": 301, "q_lora_rank": None}
    folder = write_model(family(TinyShape(**sizes, block_size=2, **changes)))
    expected = unsplit(folder)
    assert expected.shape[1] == 301
    for partition, tp_size in (((3,), 4), ((1, 2), 2), ((1, 1, 1), 4)):
        logits = traffic(Grid(folder, torch.float64, partition, tp_size))
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)


def test_more_ranks_than_vocabulary_rows_in_the_last_shard(
    write_model: Callable[[dict[str, Any]], Path],
) -> None:
    """Four ranks of two rows each for a vocabulary of five: the last rank has none."""
    shape = TinyShape(num_layers=1, mla_layers=(), vocab_size=5)
    folder = write_model(kimi_k3_config(shape) | {"eos_token_id": 4})
    (folder / "generation_config.json").unlink()

    def logits(tp_size: int) -> Tensor:
        grid = Grid(folder, torch.float64, None, tp_size)
        return grid.prefill(grid.row(5), [0, 1, 2, 3, 4])

    torch.testing.assert_close(logits(4), logits(1), rtol=0, atol=1e-9)


@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_any_cut_of_a_prompt_gives_the_same_logits(k3_folder: Path, sizes: list[int]) -> None:
    """Chunks of drawn sizes, those of one token as windows."""
    grid = Grid(k3_folder, torch.float64)
    row, start, parts = grid.row(len(TOKEN_IDS)), 0, []
    while start < len(TOKEN_IDS):
        size = sizes[len(parts) % len(sizes)]
        part = TOKEN_IDS[start : start + size]
        parts.append(grid.step([Part(row, part, is_window=len(part) == 1)]))
        start += size
    expected = grid.prefill(grid.row(len(TOKEN_IDS)), TOKEN_IDS)
    torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("most_in_group", [1, 2])
def test_how_segments_are_grouped_makes_no_difference(k3_folder: Path, most_in_group: int) -> None:
    def run(most: int) -> Tensor:
        grid = Grid(k3_folder, torch.float64)
        rows = [grid.row(16) for _ in range(5)]
        starts = [Part(row, TOKEN_IDS[: 3 + 2 * place]) for place, row in enumerate(rows[:3])]
        windows = [Part(row, [5] * (1 + row.slot), is_window=True) for row in rows[:3]]
        chunks = [Part(rows[3], TOKEN_IDS[:9]), Part(rows[4], TOKEN_IDS[:2])]
        return torch.cat([grid.step(starts, most), grid.step(windows + chunks, most)])

    torch.testing.assert_close(run(most_in_group), run(8), rtol=0, atol=1e-9)


class CountingRank(SingleRank):
    """Two ranks by name; counts the meetings."""

    size = 2

    def __init__(self) -> None:
        self.shapes: list[tuple[str, tuple[int, ...]]] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.shapes.append(("sum", tuple(tensor.shape)))
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self.shapes.append(("gather", tuple(tensor.shape)))
        return torch.cat([tensor, tensor], dim=dim)


def test_one_collective_a_sublayer(k3_folder: Path) -> None:
    """The routed sum and the shared expert's meet in one, before the routed norm."""
    config = load_model_config(k3_folder)
    stage, tp = whole_model(config.num_layers), CountingRank()
    model = load_stage(k3_folder, config, stage, tp, torch.float32)
    memory = memory_shapes(config, stage, 2, torch.float32).allocate(2, 16)
    step = step_tensors([Part(Row(slot=1, page_ids=[1]), [7, 8])])
    stream = model.forward(model.embed(step.token_ids_T), step, memory)
    model.logits(stream, torch.tensor([1]))
    latent_and_hidden = ("sum", (2, 32 + 64))
    hidden = ("sum", (2, 64))
    assert tp.shapes == [
        hidden,  # embedding
        *[hidden, hidden],  # layer 0 is dense
        *[hidden, latent_and_hidden] * 8,
        ("gather", (1, 256)),
    ]
