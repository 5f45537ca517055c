"""Loading: the ledger, and every way in which a checkpoint can be wrong, by name."""

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stagecoach.config.model import load_model_config, parse_model_config
from stagecoach.config.quantization import NamePatterns, QuantizationChoice
from stagecoach.errors import CheckpointError
from stagecoach.kernels.quantization import Mxfp4Weight, unpack_mxfp4
from stagecoach.model import weights
from stagecoach.model.checkpoint_reader import (
    INDEX_NAME,
    CheckpointReader,
    published_name,
    target_naming,
)
from stagecoach.model.kimi_k3 import StageModel
from stagecoach.model.ledger import LoadLedger, model_tensors
from stagecoach.model.parallel_linear import SingleRank
from stagecoach.model.quantization import pack_mxfp4
from stagecoach.model.shard_file import ShardFile, WantedPart
from stagecoach.model.tiny import TinyShape, kimi_k3_config, write_json, write_tiny_model
from stagecoach.model.weight_slots import WeightKind
from stagecoach.model.weights import LoadProgress, load_stage
from stagecoach.pipeline.stage import Stage, make_stages, whole_model
from tests.cpu.model.model_runs import thread_ranks

pytestmark = pytest.mark.cpu

SMALL = TinyShape(num_layers=2, mla_layers=(1,), block_size=2, num_experts=2)
PREFIX = "language_model."


class OneOfMany:
    """A rank that never meets the others: enough to load its share."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        raise AssertionError("loading does not communicate")

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        raise AssertionError("loading does not communicate")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path, kimi_k3_config(SMALL), seed=5, max_shard_bytes=60_000)
    return tmp_path


def load(
    folder: Path,
    stage: Stage | None = None,
    *,
    rank: int = 0,
    tp_size: int = 1,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[LoadProgress], None] | None = None,
) -> StageModel:
    config = load_model_config(folder)
    tp = SingleRank() if tp_size == 1 else OneOfMany(rank, tp_size)
    stage = stage or whole_model(config.num_layers)
    return load_stage(folder, config, stage, tp, dtype, progress=progress)


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Replace the shards by one file after `change` edited its tensors."""
    tensors = stored_tensors(folder)
    change(tensors)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / INDEX_NAME).unlink(missing_ok=True)
    save_file(tensors, folder / "model.safetensors")


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def shard_of(folder: Path, name: str) -> Path:
    weight_map = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    return folder / weight_map[name]


def test_all_slots_of_all_splits_hold_the_checkpoints_values(folder: Path) -> None:
    """Reassemble each tensor from the regions of the ranks and compare it with the file."""
    config = load_model_config(folder)
    tensors = {published_name(name): value for name, value in stored_tensors(folder).items()}
    for partition, tp_size in (((2,), 1), ((1, 1), 4)):
        counts = {name: torch.zeros(slot.shape) for name, slot in model_tensors(config).items()}
        for stage in make_stages(partition):
            for rank in range(tp_size):
                model = load(folder, stage, rank=rank, tp_size=tp_size)
                for slot in model.slots:
                    counts[slot.name][slot.region] += 1
                    expected = expected_tensor(tensors, slot.name, slot.shape)[slot.region]
                    assert torch.equal(slot.target.float(), expected), slot.name
        for name, count in counts.items():
            # Each value lies on one rank, or, if not split, on every rank of its stage.
            assert count.unique().tolist() in ([1.0], [float(tp_size)]), name


def expected_tensor(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    if name in tensors:
        whole = tensors[name].float()
        return whole.flatten()[: shape[0]] if name.endswith("A_log") else whole
    stem = name.removesuffix("weight")
    packed = Mxfp4Weight(tensors[stem + "weight_packed"], tensors[stem + "weight_scale"])
    return unpack_mxfp4(packed, torch.float32)


def test_a_shard_that_cuts_through_a_group_of_packed_weights(folder: Path) -> None:
    """w2 has 32 columns, one group, and each of four ranks needs eight of them."""
    slots = [
        slot
        for rank in range(4)
        for slot in load(folder, rank=rank, tp_size=4).slots
        if slot.name.endswith("experts.1.w2.weight")
    ]
    whole = next(slot for slot in load(folder).slots if slot.name == slots[0].name)
    assert [slot.region[1] for slot in slots] == [slice(8 * r, 8 * r + 8) for r in range(4)]
    assert torch.equal(torch.cat([slot.target for slot in slots], dim=1), whole.target)


def test_float32_tensors_stay_float32_in_a_bfloat16_model(folder: Path) -> None:
    model = load(folder, dtype=torch.bfloat16)
    for slot in model.slots:
        is_wide = slot.kind.is_stored_as_float32 or slot.kind is WeightKind.ROUTER
        assert slot.target.dtype == (torch.float32 if is_wide else torch.bfloat16), slot.name


def test_float64_is_float64_throughout(folder: Path) -> None:
    assert {slot.target.dtype for slot in load(folder, dtype=torch.float64).slots} == {
        torch.float64
    }


def test_a_stage_reads_only_its_own_files(folder: Path) -> None:
    """With the other stages' shards gone from the disk it still loads."""
    config = load_model_config(folder)
    stage = make_stages((1, 1))[1]
    needed = {slot.name for slot in load(folder, stage).slots}
    weight_map = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    own_files = {
        file
        for name, file in weight_map.items()
        if published_name(name).replace("_packed", "").replace("_scale", "") in needed
    }
    others = set(weight_map.values()) - own_files
    assert others, "the shards are too large for this test"
    for file in others:
        (folder / file).unlink()
    load_stage(folder, config, stage, SingleRank(), torch.float32)
    with pytest.raises(CheckpointError, match="missing shard"):
        load(folder)


def test_progress_counts_tensors_and_bytes(folder: Path) -> None:
    seen: list[LoadProgress] = []
    model = load(folder, progress=seen.append)
    assert [report.num_loaded for report in seen] == list(range(1, len(model.slots) + 1))
    assert {report.tensor for report in seen} == {slot.name for slot in model.slots}
    assert seen[-1].num_bytes == seen[-1].total_bytes == model.num_parameter_bytes


def test_vision_and_mtp_tensors_are_skipped_and_the_log_counts_them(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["vision_tower.blocks.0.weight"] = torch.zeros(2)
        tensors["mm_projector.proj.0.weight"] = torch.zeros(2)
        tensors[PREFIX + "model.mtp.0.weight"] = torch.zeros(2)

    rewrite(folder, add)
    with caplog.at_level("INFO"):
        load(folder)
    assert "skipped: 2 vision, 1 multi-token prediction" in caplog.text


def test_an_extra_layer_is_passed_over_if_it_predicts_a_further_token(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"{PREFIX}model.layers.2.{part}" for part in ("enorm.weight", "self_attn.x.weight")]

    def add(tensors: dict[str, Tensor]) -> None:
        tensors |= {name: torch.zeros(2) for name in names}

    rewrite(folder, add)
    with pytest.raises(CheckpointError, match=r"does not use: model\.layers\.2\.enorm\.weight"):
        load(folder)
    rewrite(
        folder,
        lambda tensors: tensors.update({PREFIX + "model.layers.2.eh_proj.weight": torch.ones(2)}),
    )
    with caplog.at_level("INFO"):
        load(folder)
    assert "skipped: 3 multi-token prediction" in caplog.text


def test_both_spellings_of_attention_residuals_are_read(folder: Path) -> None:
    expected = {slot.name: slot.target.clone() for slot in load(folder).slots}

    def respell(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "_res_" in name]:
            other = name.replace("_res_proj.weight", "_res.proj_weight")
            tensors[other.replace("_res_norm.weight", "_res.norm_weight")] = tensors.pop(name)

    rewrite(folder, respell)
    assert any(name.endswith("mlp_res.norm_weight") for name in stored_tensors(folder))
    for slot in load(folder).slots:
        assert torch.equal(slot.target, expected[slot.name]), slot.name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("fp8", [None, NamePatterns()])
@pytest.mark.parametrize("keeps_packed", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_pieces_of_a_few_rows_fill_what_whole_tensors_do(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    fp8: NamePatterns | None,
    rank: int,
    *,
    keeps_packed: bool,
) -> None:
    config = load_model_config(folder)
    choice = QuantizationChoice(keeps_packed=keeps_packed, fp8=fp8)
    # Packed experts are split in whole groups of 32 columns, of which a small one has one.
    tp = SingleRank() if keeps_packed else OneOfMany(rank, 2)

    def values() -> dict[str, list[Tensor]]:
        model = load_stage(folder, config, whole_model(2), tp, dtype, quantization=choice)
        return {
            slot.name: [slot.target] if isinstance(slot.target, Tensor) else list(slot.target)
            for slot in model.slots
        }

    whole = values()
    monkeypatch.setattr(weights, "PIECE_BYTES", 900)
    for name, parts in values().items():
        for part, expected in zip(parts, whole[name], strict=True):
            assert torch.equal(part.float(), expected.float()), name


def test_progress_tells_the_bytes_of_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", 900)
    seen: list[LoadProgress] = []
    load(folder, progress=seen.append)
    assert len(seen) > 2 * seen[-1].num_tensors, "more often than once a tensor"
    assert [item.num_bytes for item in seen] == sorted({item.num_bytes for item in seen})
    assert seen[-1].num_bytes == seen[-1].total_bytes
    assert seen[-1].num_loaded == seen[-1].num_tensors


def test_a_rank_reads_its_own_tensors_and_of_them_its_own_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    read_parts = ShardFile.read_parts

    def noting(self: ShardFile, wanted: Sequence[WantedPart]) -> list[Tensor]:
        parts = read_parts(self, wanted)
        for one, part in zip(wanted, parts, strict=True):
            seen.append((one.name.removeprefix(PREFIX), part.nbytes))
        return parts

    monkeypatch.setattr(ShardFile, "read_parts", noting)
    stored = {name.removeprefix(PREFIX): item for name, item in stored_tensors(folder).items()}
    for stage in make_stages((1, 1)):
        seen.clear()
        model = load(folder, stage, rank=1, tp_size=2)
        needed = {slot.name: slot for slot in model.slots}
        for name, num_bytes in seen:
            slot = needed.get(name) or needed[name.replace("_packed", "").replace("_scale", "")]
            whole = stored[name].nbytes
            if slot.kind in (WeightKind.EXPERT, WeightKind.DECAY, WeightKind.DECAY_BIAS):
                assert num_bytes <= whole
            else:
                share = math.prod(slot.target.shape) / math.prod(slot.shape)
                assert num_bytes == whole * share, name
        assert len(seen) == len(set(seen)) >= len(needed), "nothing is read twice"


def test_a_read_that_fails_in_a_thread_names_file_and_tensor(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = PREFIX + "model.layers.1.input_layernorm.weight"
    read_parts = ShardFile.read_parts

    def failing(self: ShardFile, wanted: Sequence[WantedPart]) -> list[Tensor]:
        if name in [part.name for part in wanted]:
            os.truncate(self.path, 0)
        return read_parts(self, wanted)

    monkeypatch.setattr(ShardFile, "read_parts", failing)
    path = shard_of(folder, name)
    with pytest.raises(CheckpointError, match=rf"{path.name}: {PREFIX}model.* cut short"):
        load(folder)


@pytest.mark.parametrize("shape", [[1, 1, 4, 1], [4], [128], [1, 1, 9, 1]], ids=str)
def test_every_published_shape_of_a_log(folder: Path, shape: list[int]) -> None:
    values = torch.tensor([0.5, 1.0, 1.5, 2.0])
    name = PREFIX + "model.layers.0.self_attn.A_log"

    def reshape(tensors: dict[str, Tensor]) -> None:
        padded = torch.zeros(max(shape))
        padded[:4] = values
        tensors[name] = padded.view(shape)

    rewrite(folder, reshape)
    loaded = {slot.name: slot.target for slot in load(folder).slots}
    assert torch.equal(loaded["model.layers.0.self_attn.A_log"], values)
    share = {slot.name: slot.target for slot in load(folder, rank=1, tp_size=2).slots}
    assert torch.equal(share["model.layers.0.self_attn.A_log"], values[2:])


@pytest.mark.parametrize("has_head", [True, False], ids=["head", "no head"])
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_tied_embeddings(folder: Path, *, is_tied: bool, has_head: bool) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = is_tied
    write_json(folder / "config.json", config)
    tensors = stored_tensors(folder)
    embedding = tensors[PREFIX + "model.embed_tokens.weight"].float()
    head = tensors[PREFIX + "lm_head.weight"].float()
    if not has_head:
        rewrite(folder, drop(PREFIX + "lm_head.weight"))
    if not is_tied and not has_head:
        with pytest.raises(CheckpointError, match=r"missing.*lm_head\.weight"):
            load(folder)
        return
    for partition in ((2,), (1, 1)):
        last = load(folder, make_stages(partition)[-1])
        # The final norm's ones and zero blocks make the head's rows visible in the logits.
        slots = {slot.name: slot.target for slot in last.slots}
        matrix = slots["model.embed_tokens.weight" if is_tied else "lm_head.weight"]
        assert torch.equal(matrix, embedding if is_tied else head)
        assert ("lm_head.weight" in slots) == (not is_tied)


def test_a_missing_tensor(folder: Path) -> None:
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    rewrite(folder, drop(PREFIX + name))
    with pytest.raises(CheckpointError, match=rf"missing from the checkpoint: {name} \(1\)"):
        load(folder)
    # Also for a stage that does not need it: the checkpoint is wrong for all.
    with pytest.raises(CheckpointError, match=name):
        load(folder, make_stages((1, 1))[0])


def test_half_of_a_packed_pair_is_missing(folder: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.0.w2.weight_scale"
    rewrite(folder, drop(PREFIX + name))
    with pytest.raises(CheckpointError, match=rf"missing from the checkpoint: {name} \(1\)$"):
        load(folder)


def test_an_expert_both_packed_and_plain(folder: Path) -> None:
    stem = "model.layers.1.block_sparse_moe.experts.0.w2.weight"

    def add(tensors: dict[str, Tensor]) -> None:
        tensors[PREFIX + stem] = torch.zeros(32, 32)

    rewrite(folder, add)
    with pytest.raises(CheckpointError, match=rf"does not use: {stem}_packed, {stem}_scale \(2\)"):
        load(folder)


def test_unused_tensors_are_listed_up_to_twenty(folder: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        for number in range(25):
            tensors[f"{PREFIX}model.surprise.{number:02d}"] = torch.zeros(1)

    rewrite(folder, add)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "model.surprise.19" in message and "model.surprise.20" not in message
    assert "(25 in all)" in message


def test_one_tensor_under_two_names(folder: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp_res.norm_weight"] = torch.ones(64)

    rewrite(folder, add)
    with pytest.raises(CheckpointError, match=r"mlp_res\.norm_weight.*mlp_res_norm\.weight"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("model.norm.weight", torch.ones(63), r"shape \[63\], not \[64\]"),
        ("model.layers.0.self_attn.q_proj.weight", torch.ones(64, 32), r"\[64, 32\], not \[64, 64"),
        ("model.layers.0.self_attn.A_log", torch.ones(3), r"shape \[3\], not \[4\]"),
        ("model.layers.0.self_attn.A_log", torch.ones(2, 4), r"shape \[2, 4\], not \[4\]"),
        ("model.layers.0.self_attn.dt_bias", torch.ones(65), r"shape \[65\], not \[64\]"),
        ("model.norm.weight", torch.ones(64, dtype=torch.int64), "dtype I64, not one of"),
        ("model.norm.weight", torch.ones(64).to(torch.float8_e4m3fn), "dtype F8_E4M3, not one of"),
        (
            "model.layers.1.block_sparse_moe.experts.0.w1.weight_packed",
            torch.ones(32, 16, dtype=torch.int8),
            "dtype I8, not U8",
        ),
        (
            "model.layers.1.block_sparse_moe.experts.0.w1.weight_scale",
            torch.ones(32, 2, dtype=torch.uint8),
            r"shape \[32, 2\], not \[32, 1\]",
        ),
    ],
)
def test_a_tensor_of_wrong_shape_or_dtype(
    folder: Path, name: str, bad: Tensor, message: str
) -> None:
    rewrite(folder, lambda tensors: tensors.update({PREFIX + name: bad}))
    pattern = rf"model\.safetensors: {PREFIX}{name} has .*{message}"
    with pytest.raises(CheckpointError, match=pattern):
        load(folder)


def test_experts_whose_width_cannot_be_packed(tmp_path: Path) -> None:
    shape = TinyShape(num_layers=2, mla_layers=(1,), num_experts=2, latent_size=40)
    config = kimi_k3_config(shape)
    del config["text_config"]["quantization_config"]
    write_tiny_model(tmp_path, config, seed=1)
    name = "model.layers.1.block_sparse_moe.experts.0.w1.weight"

    def pack(tensors: dict[str, Tensor]) -> None:
        del tensors[PREFIX + name]
        codes, scales = pack_mxfp4(torch.zeros(32, 64))
        tensors |= {PREFIX + name + "_packed": codes, PREFIX + name + "_scale": scales}

    rewrite(tmp_path, pack)
    with pytest.raises(CheckpointError, match=rf"{name}_packed packs 40 columns"):
        load(tmp_path)


def test_a_missing_shard(folder: Path) -> None:
    name = PREFIX + "model.layers.1.input_layernorm.weight"
    path = shard_of(folder, name)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path.name}: missing shard \(needed for {PREFIX}"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1], ids=["empty", "length only", "header", "tail"])
def test_a_truncated_shard(folder: Path, keep: int) -> None:
    path = shard_of(folder, PREFIX + "model.layers.1.input_layernorm.weight")
    path.write_bytes(path.read_bytes()[:keep])
    pattern = rf"{path.name}: damaged or cut short \(needed for {PREFIX}model"
    with pytest.raises(CheckpointError, match=pattern):
        load(folder)


def test_an_index_and_a_shard_that_disagree(folder: Path) -> None:
    name = PREFIX + "model.layers.1.input_layernorm.weight"
    path = shard_of(folder, name)
    tensors = load_file(path)
    tensor = tensors.pop(name)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=rf"{path.name}: lacks tensors .*: {name} \(1\)"):
        load(folder)
    save_file(tensors | {name: tensor, "stowaway": tensor.clone()}, path)
    with pytest.raises(CheckpointError, match=rf"{path.name}: holds tensors .*: stowaway \(1\)"):
        load(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b"\xff{}", "not valid JSON"),
        (b"[]", "must hold a JSON object, not list"),
        (b"{}", "weight_map must map names of tensors to files"),
        (b'{"weight_map": 3}', "weight_map must map names of tensors to files"),
        (b'{"weight_map": {"a": 1}}', "weight_map must map names of tensors to files"),
        (b'{"weight_map": {}}', "weight_map names no tensor"),
        (b'{"weight_map": {"a": "../x"}}', "weight_map places a in '../x', outside the folder"),
        (b'{"weight_map": {"a": "/x"}}', "weight_map places a in '/x', outside the folder"),
    ],
)
def test_an_unreadable_index(folder: Path, content: bytes, message: str) -> None:
    (folder / INDEX_NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{INDEX_NAME}: {message}"):
        load(folder)


def test_a_folder_without_weights(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / INDEX_NAME]:
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors\.index\.json and no"):
        load(folder)


def test_files_without_an_index(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    load(folder)
    first = sorted(folder.glob("*.safetensors"))[0]
    shutil.copy(first, folder / "model-copy.safetensors")
    with pytest.raises(CheckpointError, match=r"is also in"):
        load(folder)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 6}, r"linear_attn_config\.num_heads=6"),
        ({"num_heads": 6, "mla_layers": (0, 1)}, "num_attention_heads=6"),
        ({"dense_size": 98}, "intermediate_size=98"),
        ({"expert_size": 66}, "moe_intermediate_size=66"),
    ],
)
def test_sizes_that_the_ranks_do_not_divide(sizes: dict[str, int], message: str) -> None:
    shape = TinyShape(**{"num_layers": 2, "mla_layers": (1,), **sizes})  # type: ignore[arg-type]
    config = parse_model_config(kimi_k3_config(shape))
    with pytest.raises(AssertionError, match=message):
        StageModel(config, whole_model(2), thread_ranks(4)[0], torch.float32, device="meta")


def test_the_ledger_names_what_was_not_filled_once() -> None:
    slots = list(model_tensors(parse_model_config(kimi_k3_config(SMALL))).values())
    ledger = LoadLedger(slots)
    for slot in slots[:-1]:
        ledger.fill(slot)
    ledger.fill(slots[0])
    with pytest.raises(CheckpointError) as caught:
        ledger.close()
    message = str(caught.value)
    assert f"{slots[0].name} (2 times)" in message and f"{slots[-1].name} (0 times)" in message


def test_the_published_model_has_as_many_tensors_as_its_checkpoint() -> None:
    """497,052 text tensors: each expert matrix is stored as two."""
    config = kimi_k3_config(
        TinyShape(
            num_layers=93,
            mla_layers=(*range(3, 92, 4), 92),
            hidden_size=7168,
            num_heads=96,
            head_dim=128,
            dense_size=33792,
            num_experts=896,
            num_experts_per_token=16,
            expert_size=3072,
            latent_size=3584,
            q_lora_rank=1536,
            kv_lora_rank=512,
            nope_dim=128,
            rope_dim=64,
            value_dim=128,
            block_size=12,
            vocab_size=163840,
        )
    )
    needed = model_tensors(parse_model_config(config))
    num_experts = sum(slot.kind is WeightKind.EXPERT for slot in needed.values())
    assert len(needed) + num_experts == 497_052
    num_values = sum(torch.Size(slot.shape).numel() for slot in needed.values())
    # The published files hold 32 more values of padding in each of 69 A_log.
    assert num_values + 69 * 32 == 2_779_484_478_208


def test_the_reader_reads_parts(folder: Path) -> None:
    reader = CheckpointReader(folder, target_naming(has_tied_head=False))
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = stored_tensors(folder)[PREFIX + name]
    assert torch.equal(reader.read(name, (slice(3, 9), slice(0, 64))), whole[3:9])
    assert torch.equal(reader.read(name, (slice(0, 64), slice(5, 7))), whole[:, 5:7])
    assert reader.shape_and_dtype(name) == ((64, 64), "BF16")
