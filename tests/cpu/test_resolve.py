"""From EngineConfig to ResolvedConfig: open values are settled, bad ones refused by name."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from stagecoach import visible_gpus
from stagecoach.config.engine import EngineConfig, SpeculativeConfig
from stagecoach.config.quantization import NamePatterns
from stagecoach.errors import CapacityError, CheckpointError, ConfigError
from stagecoach.model.tiny import TinyShape, kimi_k3_config
from stagecoach.resolve import resolve

_CONFIG: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "intermediate_size": 96,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 4,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
    },
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
}


_DRAFT: dict[str, Any] = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "vocab_size": 131,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "target_layer_ids": [2, -1],
    "mask_token_id": 130,
    "markov_rank": 4,
    "block_size": 5,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    return tmp_path


@pytest.fixture
def draft_folder(tmp_path: Path) -> Path:
    return _write_draft(tmp_path / "draft")


def _write_draft(folder: Path, **keys: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**_DRAFT, **keys}), encoding="utf-8")
    return folder


def _speculating(folder: Path, draft: Path, **keys: Any) -> EngineConfig:
    keys = {"num_speculative_tokens": 5, **keys}
    return EngineConfig(
        model=str(folder), speculative_config=SpeculativeConfig(model=str(draft), **keys)
    )


def test_open_values_come_from_the_model(folder: Path) -> None:
    resolved = resolve(EngineConfig(model=str(folder), pipeline_parallel_size=2))
    assert resolved.checkpoint == folder
    assert resolved.max_model_len == 256
    assert resolved.dtype == "float32", "bfloat16 is slower on a CPU"
    assert len(resolved.partition) == 2 and sum(resolved.partition) == 4
    assert resolved.model.num_layers == 4


def test_values_that_were_given_stay(folder: Path) -> None:
    resolved = resolve(
        EngineConfig(
            model=str(folder),
            dtype="float64",
            max_model_len=100,
            pipeline_parallel_size=3,
            pp_partition=(1, 1, 2),
        )
    )
    assert (resolved.dtype, resolved.max_model_len) == ("float64", 100)
    assert resolved.partition == (1, 1, 2)


def test_overrides_replace_keys_of_the_file(folder: Path) -> None:
    overrides = {"max_position_embeddings": 512, "linear_attn_config": {"num_heads": 2}}
    resolved = resolve(EngineConfig(model=str(folder), hf_overrides=overrides, max_model_len=300))
    assert resolved.model.max_position_embeddings == 512
    assert resolved.model.kda.num_heads == 2
    assert resolved.model.kda.head_dim == 8, "the rest of the object stays"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"num_hidden_layers": 5}, "num_hidden_layers=5"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
    ],
)
def test_an_unsupported_override_names_the_key_and_the_option(
    folder: Path, overrides: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        resolve(EngineConfig(model=str(folder), hf_overrides=overrides))
    assert "--hf-overrides=" + json.dumps(overrides) in str(caught.value)


def test_a_refused_combination_is_refused_here(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size=3 and .*num_heads=4"):
        resolve(EngineConfig(model=str(folder), tensor_parallel_size=3))


def test_a_folder_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="--model=/nowhere/at/all"):
        resolve(EngineConfig(model="/nowhere/at/all"))


def test_a_folder_without_a_config_is_a_broken_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve(EngineConfig(model=str(tmp_path)))


def test_a_host_tier_beyond_the_memory_is_refused(folder: Path) -> None:
    with pytest.raises(CapacityError, match=r"^--kv-offloading-size=1e\+09: more GiB than"):
        resolve(EngineConfig(model=str(folder), kv_offloading_size=1e9))


def test_without_a_draft_nothing_speculates(folder: Path) -> None:
    resolved = resolve(EngineConfig(model=str(folder)))
    assert resolved.speculation is None and resolved.num_draft_tokens == 0


def test_speculation_is_settled_with_the_facts_of_the_draft(
    folder: Path, draft_folder: Path
) -> None:
    resolved = resolve(_speculating(folder, draft_folder, acceptance="rejection"))
    speculation = resolved.speculation
    assert speculation is not None
    assert speculation.checkpoint == draft_folder
    assert speculation.draft.taps.layers == (-1, 2)
    assert speculation.num_speculative_tokens == resolved.num_draft_tokens == 5
    assert speculation.acceptance == "rejection"
    assert speculation.has_confidence_schedule and speculation.has_watchdog
    assert speculation.synthetic_acceptance_length is None


@pytest.mark.parametrize("synthetic", [None, 2.5])
@pytest.mark.parametrize("is_given", [True, False, None])
def test_schedule_and_watchdog_are_on_unless_told_otherwise_or_synthetic(
    folder: Path, draft_folder: Path, is_given: bool | None, synthetic: float | None
) -> None:
    keys = {"confidence_schedule": is_given, "watchdog": is_given}
    config = _speculating(folder, draft_folder, synthetic_acceptance_length=synthetic, **keys)
    if is_given and synthetic:
        with pytest.raises(ConfigError, match=r"synthetic_acceptance_length=2\.5"):
            resolve(config)
        return
    speculation = resolve(config).speculation
    assert speculation is not None
    expected = is_given is not False and synthetic is None
    assert speculation.has_confidence_schedule == speculation.has_watchdog == expected
    assert speculation.synthetic_acceptance_length == synthetic


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"hidden_size": 64}, "the draft's hidden_size=64 and the target's hidden_size=48"),
        ({"vocab_size": 140}, "the draft's vocab_size=140 and the target's vocab_size=131"),
        ({"target_layer_ids": [4]}, "the draft's target_layer_ids=4 and num_hidden_layers=4"),
        ({"block_size": 4}, "num_speculative_tokens=5 and the draft's block length=4"),
        ({"markov_rank": 0}, "markov_rank=0"),
        ({"model_type": "llama"}, "model_type='llama'"),
    ],
)
def test_a_draft_that_does_not_fit_is_named_with_what_does_not(
    folder: Path, tmp_path: Path, keys: dict[str, Any], text: str
) -> None:
    draft = _write_draft(tmp_path / "draft", **keys)
    with pytest.raises(ConfigError) as caught:
        resolve(_speculating(folder, draft))
    assert f"--speculative-config model={draft}" in str(caught.value)
    assert text in str(caught.value)


def test_a_draft_is_no_model_and_is_named(draft_folder: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^--model={draft_folder}: config\.json: model_type="):
        resolve(EngineConfig(model=str(draft_folder)))


def test_a_draft_folder_that_is_missing_is_named(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--speculative-config model=/nowhere/at/all: .*tiny-draft"
    ):
        resolve(_speculating(folder, Path("/nowhere/at/all")))


def test_a_draft_folder_without_a_config_is_a_broken_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty: no config\.json"):
        resolve(_speculating(folder, tmp_path / "empty"))


def test_a_heavy_draft_leaves_the_last_stage_fewer_layers(folder: Path, tmp_path: Path) -> None:
    draft = _write_draft(tmp_path / "draft", intermediate_size=100_000)
    config = _speculating(folder, draft)
    config = dataclasses.replace(config, pipeline_parallel_size=2)
    assert resolve(config).partition == (3, 1)
    assert resolve(dataclasses.replace(config, speculative_config=None)).partition != (3, 1)


@pytest.mark.parametrize(
    ("num_gpus", "options", "expected"),
    [
        (0, {}, ("cpu", "float32")),
        (1, {}, ("cuda", "bfloat16")),
        (1, {"dtype": "float64"}, ("cpu", "float64")),
        (1, {"device": "cpu"}, ("cpu", "float32")),
        (1, {"pipeline_parallel_size": 2}, ("cpu", "float32")),
        (4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, ("cuda", "bfloat16")),
        (
            1,
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "uni"},
            ("cuda", "bfloat16"),
        ),
        (2, {"device": "cuda", "dtype": "float32"}, ("cuda", "float32")),
    ],
)
def test_auto_is_cuda_where_every_worker_has_a_gpu(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_gpus: int,
    options: dict[str, Any],
    expected: tuple[str, str],
) -> None:
    monkeypatch.setattr(visible_gpus, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(visible_gpus, "count", lambda least_capability=0: num_gpus)
    config = resolve(EngineConfig(model=str(folder), **options))
    assert (config.device, config.dtype) == expected


def test_too_few_gpus_are_refused_with_what_takes_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visible_gpus, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(visible_gpus, "count", lambda: 3)
    engine = EngineConfig(
        model=str(folder), device="cuda", pipeline_parallel_size=2, tensor_parallel_size=2
    )
    with pytest.raises(
        CapacityError,
        match=r"--device=cuda: 3 GPUs.*--pipeline-parallel-size=2 and --tensor-par.*=2 take 4",
    ):
        resolve(engine)


def test_gpus_that_nothing_was_built_for_are_not_taken_unasked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("stagecoach"), "propagate", True)
    old = {0: 2, 9: 0}
    monkeypatch.setattr(visible_gpus, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(visible_gpus, "count", lambda least_capability=0: old[least_capability])
    assert resolve(EngineConfig(model=str(folder))).device == "cpu"
    # Noted twice where a command has set up the log before.
    assert set(caplog.messages) == {
        "on the CPU, although GPUs are visible (2): 1 of compute capability 9 are needed"
    }
    assert resolve(EngineConfig(model=str(folder), device="cuda")).device == "cuda"


@pytest.mark.parametrize(
    ("device", "options", "is_chaining"),
    [
        ("cuda", {}, True),
        ("cpu", {}, False),
        ("cuda", {"async_scheduling": False}, False),
        ("cpu", {"async_scheduling": True}, True),
        ("cuda", {"pipeline_parallel_size": 2, "async_scheduling": True}, False),
    ],
)
def test_windows_are_chained_on_a_gpu_with_one_stage(
    folder: Path, device: str, options: dict[str, Any], is_chaining: bool
) -> None:
    config = resolve(EngineConfig(model=str(folder), device="cpu", **options))
    assert dataclasses.replace(config, device=device).is_chaining == is_chaining


def test_a_torch_without_cuda_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible_gpus, "torch_has_cuda", lambda: False)
    monkeypatch.setattr(visible_gpus, "count", lambda least_capability=0: 8)
    assert resolve(EngineConfig(model=str(folder))).device == "cpu"
    with pytest.raises(ConfigError, match=r"--device=cuda: the torch .* is without CUDA"):
        resolve(EngineConfig(model=str(folder), device="cuda"))
    with pytest.raises(ConfigError, match="--device=cuda and --dtype=float64: refused"):
        resolve(EngineConfig(model=str(folder), device="cuda", dtype="float64"))


def test_torch_is_built_for_what_its_libraries_say() -> None:
    assert visible_gpus.torch_has_cuda() == torch.backends.cuda.is_built()


@pytest.mark.parametrize(("error_code", "expected"), [(0, 8), (100, 0)])
def test_a_driver_is_asked_for_its_devices(
    monkeypatch: pytest.MonkeyPatch, error_code: int, expected: int
) -> None:
    class Driver:
        def cuInit(self, flags: int) -> int:
            return error_code

        def cuDeviceGetCount(self, number: Any) -> int:
            number._obj.value = 8
            return 0

        def cuDeviceGet(self, device: Any, ordinal: int) -> int:
            device._obj.value = ordinal
            return 0

        def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
            assert attribute == 75
            value._obj.value = 9 if device.value < 5 else 8
            return 0

    monkeypatch.setattr(visible_gpus.ctypes, "CDLL", lambda name: Driver())
    assert visible_gpus.count() == expected
    assert visible_gpus.count(9) == min(expected, 5)


def test_without_a_driver_there_are_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(visible_gpus.ctypes, "CDLL", missing)
    assert visible_gpus.count() == 0


@pytest.mark.parametrize(
    ("options", "device", "is_packed"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"mxfp4_experts": "packed"}, "cpu", True),
        ({"mxfp4_experts": "decoded"}, "cuda", False),
        # A rank's 16 columns are half a group.
        ({"tensor_parallel_size": 2}, "cuda", False),
    ],
)
def test_experts_stay_packed_on_a_gpu(
    tmp_path: Path, options: dict[str, Any], device: str, *, is_packed: bool
) -> None:
    config_json = kimi_k3_config(TinyShape())
    (tmp_path / "config.json").write_text(json.dumps(config_json), encoding="utf-8")
    config = resolve(EngineConfig(model=str(tmp_path), **options), device)
    assert config.quantization.keeps_packed == is_packed
    assert config.quantization.fp8 is None and not config.draft_quantization.keeps_packed


def test_a_draft_is_quantised_where_it_follows(folder: Path, draft_folder: Path) -> None:
    options = {"model": str(folder), "online_quantization": "ptpc_fp8", "kv_cache_dtype": "fp8"}
    exclude = ("*.mlp.*",)
    for key, is_quantised in (("none", False), ("follow", True)):
        speculative = SpeculativeConfig(
            model=str(draft_folder), num_speculative_tokens=2, online_quantization=key
        )
        config = resolve(
            EngineConfig(
                **options, online_quantization_exclude=exclude, speculative_config=speculative
            )
        )
        assert config.quantization.fp8 == NamePatterns(("*",), exclude)
        assert config.draft_quantization.fp8 == (config.quantization.fp8 if is_quantised else None)
        assert (config.cache_dtype, config.draft_cache_dtype) == ("fp8", None)


def test_rows_that_no_kernel_reads_are_refused(folder: Path, draft_folder: Path) -> None:
    """Which dtype and device there are is known once both are settled."""
    options: dict[str, Any] = {"model": str(folder), "dtype": "float32"}
    with pytest.raises(ConfigError, match="--kv-cache-dtype=bfloat16 and dtype=float32 and dev"):
        resolve(EngineConfig(**options, kv_cache_dtype="bfloat16"), "cuda")
    draft = SpeculativeConfig(
        model=str(draft_folder), num_speculative_tokens=2, kv_cache_dtype="bfloat16"
    )
    with pytest.raises(ConfigError, match="--speculative-config kv_cache_dtype=bfloat16 and dtype"):
        resolve(EngineConfig(**options, speculative_config=draft), "cuda")
    resolve(EngineConfig(**options, kv_cache_dtype="bfloat16"), "cpu")
    resolve(EngineConfig(**options, kv_cache_dtype="fp8"), "cuda")
    resolve(EngineConfig(model=str(folder), kv_cache_dtype="bfloat16"), "cuda")
