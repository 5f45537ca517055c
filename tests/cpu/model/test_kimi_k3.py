"""Kimi-K3 logits against mlx-lm's `kimi_k3`, an implementation that nobody here wrote.

Random checkpoints in the published layout go through mlx-lm's own `sanitize` and through our
loader. Tolerance 1e-4 of the largest logit in float32; 6e-6 is reached.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx import nn
from mlx_lm.models import kimi_k3 as mlx_kimi_k3
from safetensors.torch import load_file, save_file
from torch import Tensor

from stagecoach.config.model import Taps, load_model_config
from stagecoach.model.tiny import TinyShape, kimi_k3_config
from stagecoach.model.weights import load_stage
from stagecoach.pipeline.stage import make_stages, whole_model
from tests.cpu.model.model_runs import (
    Grid,
    Part,
    relative_error,
    run_ranks,
    step_tensors,
    thread_ranks,
)

pytestmark = pytest.mark.cpu

TOLERANCE = 1e-4
NUM_TOKENS = 29

SHAPES = {
    "as in the original": TinyShape(),
    "blocks of two, many experts": TinyShape(
        num_layers=7,
        mla_layers=(1, 5, 6),
        block_size=2,
        num_experts=12,
        num_experts_per_token=4,
        num_shared_experts=1,
    ),
    "one block, no latent experts": TinyShape(
        num_layers=4, mla_layers=(3,), block_size=12, latent_size=None
    ),
    "a block a layer, full-rank queries": TinyShape(
        num_layers=4, mla_layers=(0, 2), block_size=1, q_lora_rank=None, num_shared_experts=0
    ),
    "plain residuals, dense layers, tied head": TinyShape(
        num_layers=4, mla_layers=(2,), block_size=None, num_dense_layers=3, is_head_tied=True
    ),
    "wide heads, odd sizes": TinyShape(
        num_layers=3,
        mla_layers=(1,),
        hidden_size=40,
        num_heads=3,
        head_dim=20,
        dense_size=52,
        q_lora_rank=18,
        kv_lora_rank=28,
        nope_dim=10,
        rope_dim=6,
        value_dim=22,
        vocab_size=300,
    ),
}


def tokens(seed: int, count: int = NUM_TOKENS, vocab_size: int = 300) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()


def mlx_model(folder: Path, config: dict[str, Any]) -> Any:
    """mlx-lm's model of a checkpoint folder, in float32 on the CPU."""
    mx.set_default_device(mx.cpu)
    model = mlx_kimi_k3.Model(mlx_kimi_k3.ModelArgs.from_dict(config))
    weights: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= mx.load(str(path))
    if "quantization_config" in config["text_config"]:
        nn.quantize(
            model,
            group_size=32,
            bits=4,
            mode="mxfp4",
            class_predicate=lambda path, module: (
                "switch_mlp" in path and hasattr(module, "to_quantized")
            ),
        )
    model.load_weights(list(model.sanitize(weights).items()), strict=True)
    model.set_dtype(mx.float32)
    return model


def mlx_logits(model: Any, token_ids: list[int]) -> Tensor:
    return torch.from_numpy(np.array(model(mx.array([token_ids]))[0]))


@pytest.fixture(scope="session", params=SHAPES, ids=lambda name: name.replace(" ", "-"))
def model_and_oracle(
    request: pytest.FixtureRequest, write_model: Callable[[dict[str, Any]], Path]
) -> tuple[Path, Any]:
    config = kimi_k3_config(SHAPES[request.param])
    folder = write_model(config)
    return folder, mlx_model(folder, config)


def test_prefill_chunks_and_decode_give_the_oracles_logits(
    model_and_oracle: tuple[Path, Any],
) -> None:
    folder, oracle = model_and_oracle
    token_ids = tokens(1)
    expected = mlx_logits(oracle, token_ids)
    grid = Grid(folder, torch.float32)
    whole = grid.prefill(grid.row(NUM_TOKENS), token_ids)
    assert relative_error(whole, expected) < TOLERANCE
    chunked = grid.prefill(grid.row(NUM_TOKENS), token_ids, chunk=7)
    assert relative_error(chunked, expected) < TOLERANCE
    row = grid.row(NUM_TOKENS)
    start = grid.prefill(row, token_ids[:11])
    decoded = torch.cat([start, grid.decode(row, token_ids[11:])])
    assert relative_error(decoded, expected) < TOLERANCE


def test_a_mixed_step_gives_each_row_what_it_gets_alone(
    model_and_oracle: tuple[Path, Any],
) -> None:
    folder, oracle = model_and_oracle
    first, second, third = tokens(2), tokens(3), tokens(4)
    grid = Grid(folder, torch.float32)
    rows = [grid.row(NUM_TOKENS) for _ in range(3)]
    grid.step([Part(rows[0], first[:20]), Part(rows[1], second[:3])])
    # A window of three tokens and one of one beside two chunks.
    mixed = grid.step(
        [
            Part(rows[0], first[20:23], is_window=True),
            Part(rows[2], third[:9]),
            Part(rows[1], second[3:4], is_window=True),
        ]
    )
    expected = torch.cat(
        [
            mlx_logits(oracle, first)[20:23],
            mlx_logits(oracle, second)[3:4],
            mlx_logits(oracle, third)[:9],
        ]
    )
    assert relative_error(mixed, expected) < TOLERANCE


def test_unpacked_experts_names_without_prefix_and_other_spellings(
    write_model: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    """Unpacked BF16 experts under the alternative names give what the same names give there."""
    config = kimi_k3_config(TinyShape(num_layers=3, mla_layers=(1,), block_size=2))
    del config["text_config"]["quantization_config"]
    folder = write_model(config)
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    respelt = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("language_model.")
        for part in ("proj", "norm"):
            name = name.replace(f"_res_{part}.weight", f"_res.{part}_weight")
        respelt[name] = tensor
    save_file(respelt, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    token_ids = tokens(5)
    expected = mlx_logits(mlx_model(tmp_path, config), token_ids)
    for place in (folder, tmp_path):
        grid = Grid(place, torch.float32)
        assert relative_error(grid.prefill(grid.row(NUM_TOKENS), token_ids), expected) < TOLERANCE


@pytest.mark.parametrize(
    "shape",
    [
        # Without routers: in a random network a rounded router soon chooses other experts.
        TinyShape(num_dense_layers=9),
        TinyShape(num_layers=1, mla_layers=(), num_dense_layers=0),
    ],
    ids=["nine dense layers", "one layer of experts"],
)
def test_bfloat16_stays_near_float32(
    write_model: Callable[[dict[str, Any]], Path], shape: TinyShape
) -> None:
    folder = write_model(kimi_k3_config(shape))
    token_ids = tokens(6)
    exact = Grid(folder, torch.float32)
    expected = exact.prefill(exact.row(NUM_TOKENS), token_ids)
    rounded = Grid(folder, torch.bfloat16)
    row = rounded.row(NUM_TOKENS)
    logits = torch.cat([rounded.prefill(row, token_ids[:20]), rounded.decode(row, token_ids[20:])])
    assert logits.dtype == torch.float32
    error = (logits - expected).abs().mean() / expected.abs().mean()
    assert 1e-4 < error < 0.05


def test_the_head_is_computed_only_for_the_rows_asked_for(k3_folder: Path) -> None:
    config = load_model_config(k3_folder)
    grid = Grid(k3_folder, torch.float64)
    token_ids = tokens(7, count=9)
    every = grid.prefill(grid.row(9), token_ids)
    model, memory = grid.models[0][0], grid.memories[0][0]
    row = grid.row(9)
    step = step_tensors([Part(row, token_ids)])
    stream = model.forward(model.embed(step.token_ids_T), step, memory)
    some = model.logits(stream, torch.tensor([8, 2]))
    assert some.shape == (2, config.vocab_size) and some.dtype == torch.float64
    torch.testing.assert_close(some, every[[8, 2]], rtol=0, atol=1e-12)
    assert model.logits(stream, torch.tensor([], dtype=torch.int64)).shape == (0, 512)
    torch.testing.assert_close(model.logits(stream, None), every, rtol=0, atol=1e-12)


def mlx_taps(
    model: Any, token_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], list[Tensor]]:
    """Prefix and mixture values of taps -1, 0, ... as the oracle computes them."""
    layer_type = mlx_kimi_k3.KimiK3DecoderLayer
    run_layer, run_mix = layer_type.__call__, mlx_kimi_k3._attn_res_mix
    prefixes: list[Any] = []
    mixes: list[Any] = []

    def record_layer(self: Any, x: Any, *args: Any, **options: Any) -> Any:
        if not prefixes:
            prefixes.append(x)
        result = run_layer(self, x, *args, **options)
        prefixes.append(result[0])
        return result

    def record_mix(*args: Any) -> Any:
        mixes.append(run_mix(*args))
        return mixes[-1]

    with monkeypatch.context() as patch:
        patch.setattr(layer_type, "__call__", record_layer)
        patch.setattr(mlx_kimi_k3, "_attn_res_mix", record_mix)
        mlx_logits(model, token_ids)
    # A layer mixes for its attention and for its MLP; the final norm mixes last.
    read = mixes[::2] if mixes else prefixes
    return (
        [torch.from_numpy(np.array(value[0])) for value in prefixes],
        [torch.from_numpy(np.array(value[0])) for value in read],
    )


def in_one_stage(grid: Grid) -> dict[int, Tensor]:
    [taps] = grid.taps
    return taps


@pytest.mark.parametrize("are_mixtures", [False, True], ids=["prefix", "mixture"])
def test_taps_are_what_the_oracle_has_between_its_layers(
    model_and_oracle: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, are_mixtures: bool
) -> None:
    """In one chunk, and in a chunk and steps of one token."""
    folder, oracle = model_and_oracle
    token_ids = tokens(8)
    expected = mlx_taps(oracle, token_ids, monkeypatch)[are_mixtures]
    num_layers = load_model_config(folder).num_layers
    ids = range(-1, num_layers)
    grid = Grid(folder, torch.float32, taps=Taps(tuple(ids), are_mixtures))
    grid.prefill(grid.row(NUM_TOKENS), token_ids)
    whole = in_one_stage(grid)
    row = grid.row(NUM_TOKENS)
    grid.prefill(row, token_ids[:20])
    by_token = [in_one_stage(grid)]
    for token in token_ids[20:]:
        grid.decode(row, [token])
        by_token.append(in_one_stage(grid))
        assert {tap_TH.shape[0] for tap_TH in by_token[-1].values()} == {1}
    assert sorted(whole) == list(ids) and len(expected) == len(ids)
    for tap, reference in zip(ids, expected, strict=True):
        assert relative_error(whole[tap], reference) < TOLERANCE
        decoded = torch.cat([taps[tap] for taps in by_token])
        assert relative_error(decoded, reference) < TOLERANCE


@pytest.mark.parametrize("are_mixtures", [False, True], ids=["prefix", "mixture"])
@pytest.mark.parametrize(
    "partition", [(5, 4), (2, 3, 3, 1), (1, 1, 1, 1, 1, 1, 1, 2)], ids=lambda counts: len(counts)
)
def test_each_stage_makes_its_taps_once_and_with_the_bits_of_one_stage(
    k3_folder: Path, partition: tuple[int, ...], are_mixtures: bool
) -> None:
    """Every possible tap; the stage that reads a mixture makes it."""
    token_ids = tokens(9, count=6)
    taps = Taps(tuple(range(-1, 9)), are_mixtures)
    whole = Grid(k3_folder, torch.float64, taps=taps)
    logits = whole.prefill(whole.row(6), token_ids)
    split = Grid(k3_folder, torch.float64, partition, taps=taps)
    assert torch.equal(split.prefill(split.row(6), token_ids), logits)
    made = [tap for of_stage in split.taps for tap in sorted(of_stage)]
    assert made == list(taps.layers)
    for stage, of_stage in zip(make_stages(partition), split.taps, strict=True):
        first = stage.start - 1 if are_mixtures or stage.is_first else stage.start
        last = stage.end - 2 if are_mixtures and not stage.is_last else stage.end - 1
        assert sorted(of_stage) == list(range(first, last + 1))
        for tap, tap_TH in of_stage.items():
            assert torch.equal(tap_TH, in_one_stage(whole)[tap])


def test_taps_change_no_logits_and_are_not_made_unasked(k3_folder: Path) -> None:
    token_ids = tokens(10, count=9)
    plain = Grid(k3_folder, torch.float64)
    expected = plain.prefill(plain.row(9), token_ids)
    assert plain.taps == [{}]
    for taps in (Taps((2, 5)), Taps((2, 5), are_mixtures=True)):
        grid = Grid(k3_folder, torch.float64, taps=taps)
        assert torch.equal(grid.prefill(grid.row(9), token_ids), expected)
        assert sorted(in_one_stage(grid)) == [2, 5]


def test_the_embedding_tap_is_the_first_stages_output_itself(k3_folder: Path) -> None:
    """The last stage has the embedding too, yet makes no such tap."""
    grid = Grid(k3_folder, torch.float64, (4, 5), taps=Taps((-1,)))
    token_ids = tokens(11, count=5)
    grid.prefill(grid.row(5), token_ids)
    of_first, of_last = grid.taps
    assert not of_last
    model = grid.models[0][0]
    assert torch.equal(of_first[-1], model.embedding(torch.tensor(token_ids)))
    stream = model.embed(torch.tensor(token_ids))
    assert stream.taps[-1].data_ptr() == stream.partial_TH.data_ptr()


@pytest.mark.parametrize("is_head_tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_last_stage_with_taps_has_the_first_stages_embedding(
    write_model: Callable[[dict[str, Any]], Path], tp_size: int, is_head_tied: bool
) -> None:
    """One copy a rank: a tied head is the embedding's."""
    shape = TinyShape(num_layers=3, mla_layers=(1,), is_head_tied=is_head_tied)
    folder = write_model(kimi_k3_config(shape))
    config = load_model_config(folder)
    first, last = make_stages((2, 1))

    def load(stage: Any, taps: Taps | None) -> list[Any]:
        return [
            load_stage(folder, config, stage, rank, torch.float64, taps=taps)
            for rank in thread_ranks(tp_size)
        ]

    token_ids = torch.tensor(tokens(12, vocab_size=config.vocab_size))
    taps = Taps((0,))
    of_first, of_last, plain = load(first, taps), load(last, taps), load(last, None)
    expected = run_ranks([lambda model=model: model.embedding(token_ids) for model in of_first])
    copies = run_ranks([lambda model=model: model.embedding(token_ids) for model in of_last])
    for copy in copies:
        assert torch.equal(copy, expected[0])
    matrix = config.vocab_size // tp_size * config.hidden_size * 8
    for with_taps, without in zip(of_last, plain, strict=True):
        extra = with_taps.num_parameter_bytes - without.num_parameter_bytes
        assert extra == (0 if is_head_tied else matrix)
        with pytest.raises(AssertionError, match="no embedding on"):
            _ = without.embedding
        with pytest.raises(AssertionError, match="only the first stage embeds"):
            with_taps.embed(token_ids)
        assert with_taps.head is not None
    with pytest.raises(AssertionError, match="only the last stage has the head"):
        _ = of_first[0].head


@pytest.mark.parametrize("tap", [-2, 9])
def test_a_tap_of_no_layer_is_our_mistake(k3_folder: Path, tap: int) -> None:
    config = load_model_config(k3_folder)
    [rank] = thread_ranks(1)
    with pytest.raises(AssertionError, match="no such layer"):
        load_stage(
            k3_folder,
            config,
            whole_model(9),
            rank,
            torch.float64,
            taps=Taps(tuple(sorted((3, tap)))),
        )
