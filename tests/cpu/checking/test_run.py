"""Every verdict of a check: that it holds where it should, and each way in which it fails."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stagecoach.checking import generation
from stagecoach.checking import run as checks
from stagecoach.checking.run import CheckOptions, run_checks
from stagecoach.checking.verdict import Report, Verdict
from stagecoach.config.engine import SpeculativeConfig
from stagecoach.draft.tiny import TinyDraftShape, mla_draft_config, write_tiny_draft
from stagecoach.errors import CapacityError
from stagecoach.model.tiny import (
    TinyShape,
    kimi_k3_config,
    kimi_linear_config,
    write_json,
    write_tiny_model,
)
from stagecoach.pipeline.handoff import Handoff

SHAPE = TinyShape(num_layers=4, mla_layers=(2, 3), block_size=2, num_experts=2, max_length=512)
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight"
MATRIX = "language_model.model.layers.1.self_attn.q_proj.weight"
NORM = "language_model.model.layers.1.input_layernorm.weight"


class Notes:
    """A watch that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.verdicts: list[Verdict] = []
        self.progress: list[tuple[str, int, int]] = []

    def tell(self, line: str) -> None:
        self.lines.append(line)

    def reach(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)

    def advance(self, task: str, done_bytes: int, total_bytes: int) -> None:
        self.progress.append((task, done_bytes, total_bytes))


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    write_tiny_model(folder, kimi_k3_config(SHAPE), seed=3, max_shard_bytes=100_000)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy of the sound one, to be damaged."""
    return shutil.copytree(sound, tmp_path / "model")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    write_tiny_draft(folder, mla_draft_config(TinyDraftShape(taps=(3, -1, 1))), seed=4)
    return folder


def check(
    folder: Path,
    draft: Path | None = None,
    options: Mapping[str, object] = MappingProxyType({}),
    **changes: object,
) -> Report:
    """Headers and values alone unless told otherwise."""
    engine = {
        "pipeline_parallel_size": 2,
        "device": "cpu",
        "num_threads": 1,
        "log_level": "warning",
        "speculative_config": None
        if draft is None
        else SpeculativeConfig(model=str(draft), num_speculative_tokens=3),
        **options,
    }
    settings = {"has_layers": False, "watch": Notes(), **changes}
    watch = settings.pop("watch")
    asked = CheckOptions(model=str(folder), engine=engine, **settings)  # type: ignore[arg-type]
    return run_checks(asked, watch)  # type: ignore[arg-type]


def verdicts(report: Report) -> dict[str, str]:
    return {verdict.check: verdict.status for verdict in report.verdicts}


def failure(report: Report, check: str) -> str:
    """The text of the one check that failed."""
    failed = {item.check: item.detail for item in report.verdicts if item.status == "failed"}
    assert not report.is_ok and set(failed) == {check}, failed
    return failed[check]


def change(folder: Path, name: str, edit: Callable[[Tensor], Tensor]) -> None:
    """Rewrite the file that holds a tensor."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name] = edit(tensors[name])
            save_file(tensors, path)
            return
    raise AssertionError(name)


def fill(value: float) -> Callable[[Tensor], Tensor]:
    def edit(tensor: Tensor) -> Tensor:
        tensor.view(-1)[3] = value
        return tensor

    return edit


def test_a_sound_checkpoint_passes_everything(sound: Path) -> None:
    watch = Notes()
    report = check(sound, has_layers=True, watch=watch)
    assert report.is_ok and set(verdicts(report).values()) == {"ok"}, report
    assert list(verdicts(report)) == [
        checks.CONFIGURATION, checks.FILES, checks.TENSORS, checks.TOKENIZER, checks.CHAT,
        checks.LAYERS, checks.BOUNDARIES, checks.VALUES, checks.ENGINES,
    ]  # fmt: skip
    assert tuple(watch.verdicts) == report.verdicts
    assert any(line.startswith("reads ") and "/s (what" in line for line in watch.lines)
    assert any("layer groups one after the other" in line for line in watch.lines)
    task, done, total = watch.progress[-1]
    assert task.startswith("layers ") and done == total > 0


def test_a_draft_that_knows_nothing_is_told_apart(sound: Path, draft: Path) -> None:
    """All of it works, and the engine's tokens are right, but nothing is accepted."""
    report = check(sound, draft, has_layers=True)
    statuses = verdicts(report)
    acceptance = statuses.pop(checks.DRAFT_ACCEPTANCE)
    assert set(statuses.values()) == {"ok"}, report
    if acceptance == "failed":
        assert "not trained for this target" in failure(report, checks.DRAFT_ACCEPTANCE)


def test_what_does_not_fit_is_run_layer_by_layer(sound: Path, draft: Path) -> None:
    watch = Notes()
    report = check(sound, draft, has_layers=True, memory_bytes=430_000, watch=watch)
    statuses = verdicts(report)
    assert statuses[checks.BOUNDARIES] == statuses[checks.DRAFT_PASS] == "ok", report
    assert statuses[checks.ENGINES] == statuses[checks.DRAFT_ACCEPTANCE] == "skipped"
    assert report.is_ok
    names = {task for task, _, _ in watch.progress}
    assert len(names) >= 3 and "layer 3" in names, "its stage is cut into groups"
    assert any("(layer 3)" in line for line in watch.lines), "the largest has both vocabularies"


def test_an_engine_without_room_is_no_fault_of_the_checkpoint(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **options: object) -> None:
        raise CapacityError("too little memory")

    monkeypatch.setattr(generation, "LLM", refuse)
    report = check(sound, has_layers=True)
    assert report.is_ok and verdicts(report)[checks.ENGINES] == "skipped"


@pytest.mark.parametrize(
    "options",
    [
        {"recover": True},
        {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1"},
        {"launcher": "ray"},
        {"tensor_parallel_size": 2, "online_quantization": "ptpc_fp8"},
    ],
)
def test_options_of_serving_are_none_of_the_engines_here(
    sound: Path, options: dict[str, object]
) -> None:
    report = check(sound, options=options, has_layers=True, has_values=False)
    assert report.is_ok and verdicts(report)[checks.ENGINES] == "ok", report


def test_a_layer_too_large_for_the_memory_skips_what_needs_it(sound: Path) -> None:
    report = check(sound, has_layers=True, memory_bytes=1000)
    statuses = verdicts(report)
    assert statuses[checks.LAYERS] == statuses[checks.BOUNDARIES] == "skipped"
    assert statuses[checks.VALUES] == "ok", "values need no memory"


def test_what_is_left_out_says_so(sound: Path) -> None:
    report = check(sound, has_values=False)
    details = {item.check: item.detail for item in report.verdicts if item.status == "skipped"}
    assert details[checks.VALUES] == "--skip-values" and details[checks.LAYERS] == "--skip-layers"


def test_a_configuration_that_is_not_implemented(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["hidden_act"] = "relu"
    write_json(folder / "config.json", config)
    report = check(folder)
    assert "hidden_act" in failure(report, checks.CONFIGURATION)
    assert verdicts(report)[checks.FILES] == "skipped"


def test_a_file_that_was_cut_short(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-1])
    text = failure(check(folder), checks.FILES)
    assert path.name in text and "cut short" in text


def test_a_tensor_of_another_shape(folder: Path) -> None:
    change(folder, MATRIX, lambda tensor: tensor[:-1].clone())
    assert "q_proj.weight has shape [63, 64]" in failure(check(folder), checks.TENSORS)


def test_a_tokenizer_of_another_model(folder: Path) -> None:
    ranks = folder / "tiktoken.model"
    ranks.write_text("\n".join(ranks.read_text().splitlines()[:-1]) + "\n")
    report = check(folder)
    assert "511 tokens, the model's vocab_size=512" in failure(report, checks.TOKENIZER)
    assert verdicts(report)[checks.CHAT] == "skipped"


def test_a_tokenizer_that_changes_texts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stagecoach.text.tokenizer import Tokenizer

    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: encode(self, text.lower()))
    assert "came back as 'hello, world!'" in failure(check(folder), checks.TOKENIZER)


def test_a_tokenizer_without_the_chat_formats_tokens(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("<|sep|>", "<|other|>"))
    assert "no special token '<|sep|>'" in failure(check(folder), checks.CHAT)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for message in messages %}{{ message.role }}{% endfor %}", "words are not in"),
        ("{{ raise_exception('never') }}", "conversation is refused"),
        ("", "has no chat template"),
    ],
)
def test_a_chat_template_that_is_of_no_use(tmp_path: Path, template: str, text: str) -> None:
    write_tiny_model(tmp_path, kimi_linear_config(SHAPE), seed=3)
    if template:
        (tmp_path / "chat_template.jinja").write_text(template)
        assert text in failure(check(tmp_path), checks.CHAT)
    else:
        [chat] = [item for item in check(tmp_path).verdicts if item.check == checks.CHAT]
        assert chat.status == "skipped" and text in chat.detail


@pytest.mark.parametrize(
    ("name", "edit", "text"),
    [
        (MATRIX, fill(float("nan")), "NaN: model.layers.1.self_attn.q_proj.weight (1)"),
        (NORM, fill(float("inf")), "infinite: model.layers.1.input_layernorm.weight (1)"),
        (MATRIX, fill(1e9), "absurdly large: model.layers.1.self_attn.q_proj.weight"),
        (MATRIX, torch.zeros_like, "all zero: model.layers.1.self_attn.q_proj.weight"),
        (EXPERT + "_packed", torch.zeros_like, "all zero: "),
        (EXPERT + "_scale", torch.zeros_like, "all zero: "),
        (EXPERT + "_scale", fill(255), "NaN: "),
        (EXPERT + "_scale", fill(200), "absurdly large: "),
    ],
)
def test_values_that_cannot_be_weights(
    folder: Path, name: str, edit: Callable[[Tensor], Tensor], text: str
) -> None:
    change(folder, name, edit)
    assert text in failure(check(folder), checks.VALUES)


def test_layers_whose_values_are_not_finite(folder: Path) -> None:
    change(folder, NORM, fill(float("inf")))
    report = check(folder, has_layers=True)
    failed = {item.check: item.detail for item in report.verdicts if item.status == "failed"}
    assert set(failed) == {checks.LAYERS, checks.VALUES}
    assert failed[checks.LAYERS] == "NaN or infinity behind layer 1"
    assert verdicts(report)[checks.ENGINES] == "skipped"


def test_a_boundary_that_changes_what_crosses(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = Handoff.receive

    def received(self: Handoff, num_tokens: int) -> dict[str, Tensor]:
        return {name: -field for name, field in receive(self, num_tokens).items()}

    monkeypatch.setattr(Handoff, "receive", received)
    report = check(folder, has_layers=True)
    failed = {item.check: item.detail for item in report.verdicts if item.status == "failed"}
    assert set(failed) == {checks.BOUNDARIES, checks.ENGINES}
    assert "differ behind layer 3" in failed[checks.BOUNDARIES]
    assert "differs from one stage from token" in failed[checks.ENGINES]


def edit_draft(draft: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(draft / "model.safetensors")
    edit(tensors)
    save_file(tensors, draft / "model.safetensors")


def test_a_draft_without_one_of_its_tensors(sound: Path, draft: Path) -> None:
    edit_draft(draft, lambda tensors: tensors.pop("final_norm.weight"))  # type: ignore[arg-type]
    report = check(sound, draft)
    assert "final_norm.weight" in failure(report, checks.DRAFT)
    assert verdicts(report)[checks.DRAFT_VALUES] == "skipped"


def test_a_draft_for_another_width(sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    write_tiny_draft(folder, mla_draft_config(TinyDraftShape(taps=(1,), hidden_size=32)), seed=4)
    report = check(sound, folder)
    assert "hidden_size" in failure(report, checks.DRAFT_CONFIGURATION)
    statuses = verdicts(report)
    assert statuses[checks.TENSORS] == statuses[checks.VALUES] == "ok", "the model is what it was"
    assert statuses[checks.DRAFT] == statuses[checks.DRAFT_PASS] == "skipped"


def test_a_draft_whose_values_are_not_finite(sound: Path, draft: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["layers.0.mlp.up_proj.weight"][0, 0] = float("nan")

    edit_draft(draft, spoil)
    assert "layers.0.mlp.up_proj.weight" in failure(check(sound, draft), checks.DRAFT_VALUES)
    report = check(sound, draft, has_layers=True)
    failed = {item.check: item.detail for item in report.verdicts if item.status == "failed"}
    assert failed[checks.DRAFT_PASS] == "NaN or infinity in the logits of a block"
