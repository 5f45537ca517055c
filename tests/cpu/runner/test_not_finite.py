"""Weights that hold NaN end the segments that they reach, on grids of stages and ranks.

What they reach is found by running each request alone, token by token. Plans are written by
hand and go on with requests that have ended.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stagecoach.config.engine import SpeculativeConfig
from stagecoach.draft.tiny import TinyDraftShape, mla_draft_config, write_tiny_draft
from stagecoach.model import tiny
from stagecoach.schedule.step_plan import RowResult, Segment, StepResult
from tests.cpu.runner.stage_runs import (
    SHAPE,
    Run,
    Script,
    assert_same,
    config_of,
    mixed_plans,
    run_grid,
    tenants,
)

torch.set_num_threads(1)
pytestmark = pytest.mark.cpu

NUM_DRAFTS = 3
SHAPES = {
    "kimi_k3": SHAPE,
    # Many experts, one a token: most tokens do not meet a given one.
    "kimi_linear": dataclasses.replace(SHAPE, num_experts=16, num_experts_per_token=1),
}
# Of no request; the first of the second rank, where it stands in for rows of the others.
UNUSED_TOKENS = [256]


def spoil(folder: Path, name: str, rows: slice | list[int]) -> None:
    """NaN in some rows of every tensor whose name ends so."""
    changed = 0
    for path in folder.glob("*.safetensors"):
        tensors: dict[str, Tensor] = load_file(path)
        for key, tensor in tensors.items():
            if key.endswith(name):
                tensor[rows] = torch.nan
                changed += 1
        save_file(tensors, path)
    assert changed == 1, name


class Spoilt(NamedTuple):
    """A checkpoint with NaN in one tensor."""

    model: str
    name: str
    rows: slice | list[int]
    ended: set[int]  # requests that meet it


def embedding_rows(token_ids: list[int], ended: set[int]) -> Spoilt:
    return Spoilt("kimi_k3", "embed_tokens.weight", token_ids, ended)


SPOILT = {
    "embedding row of the third": embedding_rows([tenants()[2].token_ids[9]], {3}),
    "embedding row of a draft that nothing comes of": embedding_rows(
        [tenants()[1].token_ids[7]], set()
    ),
    "embedding row of a draft that is replayed": embedding_rows([tenants()[2].token_ids[11]], {3}),
    "embedding rows of nobody": embedding_rows(UNUSED_TOKENS, set()),
    "expert": Spoilt(
        "kimi_linear", "layers.3.block_sparse_moe.experts.7.w1.weight", slice(None), {1, 3}
    ),
    # Which a token meets without leaving a trace in any state or cache row.
    "expert of the last layer": Spoilt(
        "kimi_linear", "layers.5.block_sparse_moe.experts.2.w2.weight", slice(None), {1, 2, 4}
    ),
    "KDA head": Spoilt("kimi_k3", "layers.3.self_attn.k_proj.weight", slice(8, 16), {1, 2, 3, 4}),
    "decay of a KDA head": Spoilt("kimi_linear", "layers.2.self_attn.A_log", [0], {1, 2, 3, 4}),
    "row of the head": Spoilt("kimi_k3", "lm_head.weight", [300], {1, 2, 3, 4}),
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("clean")
    configs = {"kimi_k3": tiny.kimi_k3_config, "kimi_linear": tiny.kimi_linear_config}
    for name, config in configs.items():
        tiny.write_tiny_model(folder / name, config(SHAPES[name]), seed=3)
    return {name: folder / name for name in configs}


@pytest.fixture(scope="module")
def speculative(tmp_path_factory: pytest.TempPathFactory) -> SpeculativeConfig:
    folder = tmp_path_factory.mktemp("draft")
    config = mla_draft_config(TinyDraftShape(taps=(5, -1, 2), hidden_size=SHAPE.hidden_size))
    write_tiny_draft(folder, config, seed=6)
    return SpeculativeConfig(model=str(folder), num_speculative_tokens=NUM_DRAFTS)


@pytest.fixture(scope="module")
def clean_runs(clean: dict[str, Path], speculative: SpeculativeConfig) -> dict[str, Run]:
    return {
        name: run_grid(
            config_of(folder, speculative_config=speculative), mixed_plans(speculates=True)
        )
        for name, folder in clean.items()
    }


def spoilt_positions(folder: Path) -> dict[int, set[int]]:
    """By request, the tokens that come out not finite."""
    script = Script()
    for tenant in tenants():
        for _ in range(4 * len(tenant.pages)):
            script.add((tenant, 1, "chunk"))
    positions: dict[int, set[int]] = {tenant.request_id: set() for tenant in tenants()}
    for plan, [row] in zip(
        script.plans, run_grid(config_of(folder), script.plans).rows, strict=True
    ):
        if not row.is_finite:
            positions[row.request_id].add(plan.segments[0].start)
    return positions


LAYOUTS = [((1, 3, 2), 1), ((3, 3), 2)]


@pytest.mark.parametrize("case", SPOILT)
def test_exactly_the_segments_that_meet_a_spoilt_weight_end(
    case: str,
    clean: dict[str, Path],
    clean_runs: dict[str, Run],
    speculative: SpeculativeConfig,
    tmp_path: Path,
) -> None:
    """All others give what a clean model gives, drafts included; and no rank stops."""
    spoilt = SPOILT[case]
    folder = tmp_path / "spoilt"
    shutil.copytree(clean[spoilt.model], folder)
    spoil(folder, spoilt.name, spoilt.rows)
    positions = spoilt_positions(folder)
    plans = mixed_plans(speculates=True)
    ended = set()
    for partition, tp_size in LAYOUTS:
        run = run_grid(config_of(folder, partition, tp_size, speculative), plans)
        for plan, ours, theirs in zip(plans, run.rows, clean_runs[spoilt.model].rows, strict=True):
            for segment, row, clean_row in zip(plan.segments, ours, theirs, strict=True):
                bad = positions[segment.request_id]
                is_finite = bad.isdisjoint(range(segment.start, segment.certain_end))
                if case == "row of the head":
                    is_finite = segment.sampling_row is None
                assert row.is_finite == is_finite, segment
                if not is_finite:
                    ended.add(segment.request_id)
                    assert row == RowResult(
                        request_id=row.request_id, epoch=0, token_ids=(), is_finite=False
                    )
                elif segment.request_id not in ended and case != "row of the head":
                    check_same(segment, row, clean_row)
    assert ended == spoilt.ended


def check_same(segment: Segment, row: RowResult, clean_row: RowResult) -> None:
    # Tokens behind drafts that nothing comes of may be anything.
    ours, theirs = (
        msgspec.structs.replace(
            item, prompt_logprobs=item.prompt_logprobs[: segment.certain_end - segment.start]
        )
        for item in (row, clean_row)
    )
    assert_same([(ours,)], [(theirs,)])
    assert row.draft_token_ids == clean_row.draft_token_ids
    assert row.confidences == pytest.approx(clean_row.confidences, abs=1e-9)


def test_a_spoilt_draft_model_changes_no_token(
    clean: dict[str, Path],
    speculative: SpeculativeConfig,
    clean_runs: dict[str, Run],
    tmp_path: Path,
) -> None:
    """Its drafts are something, its confidences nothing, and all of it can be sent."""
    shutil.copytree(speculative.model, tmp_path / "draft")
    spoil(tmp_path / "draft", "context_proj.weight", slice(None))
    spoilt = SpeculativeConfig(model=str(tmp_path / "draft"), num_speculative_tokens=NUM_DRAFTS)
    config = config_of(clean["kimi_k3"], (3, 3), 2, spoilt)
    run = run_grid(config, mixed_plans(speculates=True))
    assert_same(run.rows, clean_runs["kimi_k3"].rows)
    for step, rows in enumerate(run.rows):
        for row in rows:
            assert row.is_finite and set(row.confidences) <= {0.0}
            assert len(row.confidences) == len(row.draft_token_ids)
        result = StepResult(step=step, digest=b"", rows=rows)
        sent = msgspec.msgpack.encode(result)
        assert msgspec.msgpack.decode(sent, type=StepResult) == result
