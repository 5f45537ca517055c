"""Any split over stages and ranks computes what one rank computes, in float64 to 1e-9."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stagecoach.model.tiny import TinyShape, kimi_k3_config, kimi_linear_config
from tests.cpu.model.model_runs import Grid, Part

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
    ("family", "is_head_tied"),
    [(kimi_linear_config, False), (kimi_k3_config, True)],
    ids=["Kimi-Linear", "Kimi-K3 with a tied head"],
)
def test_a_vocabulary_that_the_ranks_do_not_divide(
    write_model: Callable[[dict[str, Any]], Path],
    family: Callable[[TinyShape], dict[str, Any]],
    is_head_tied: bool,
) -> None:
    shape = TinyShape(
        num_layers=3,
        mla_layers=(1,),
        vocab_size=301,
        is_head_tied=is_head_tied,
        q_lora_rank=None,
        block_size=2,
    )
    folder = write_model(family(shape))
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
    folder = write_model(kimi_k3_config(shape))

    def logits(tp_size: int) -> Tensor:
        grid = Grid(folder, torch.float64, None, tp_size)
        return grid.prefill(grid.row(5), [0, 1, 2, 3, 4])

    torch.testing.assert_close(logits(4), logits(1), rtol=0, atol=1e-9)
