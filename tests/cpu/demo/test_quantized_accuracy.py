"""Quantised weights and rows with everything else at once: the scores stay, the answers agree."""

import pytest

from stagecoach.demo.evaluation import EvaluationReport
from tests.demo_answers import SPECULATION, evaluate

pytestmark = pytest.mark.cpu

SIZES = {"limit": 2, "seed": 2, "num_fewshot": 1, "max_num_seqs": 4}
FORMATS = {
    "mxfp4_experts": "packed",
    "online_quantization": "ptpc_fp8",
    "kv_cache_dtype": "fp8",
}
A_POINT = 0.01


@pytest.fixture(scope="module")
def full() -> EvaluationReport:
    """The draft is quantised like the target."""
    return evaluate(
        **SIZES,
        pipeline_parallel_size=2,
        tensor_parallel_size=4,
        speculative_config={
            **SPECULATION,
            "online_quantization": "follow",
            "kv_cache_dtype": "fp8",
        },
        debug_poison=True,
        **FORMATS,
    )


def test_scores_are_within_a_point_of_those_without(full: EvaluationReport) -> None:
    plain = evaluate(**SIZES)
    assert all(score > 0 for score in plain.tasks.values())
    for family, score in plain.tasks.items():
        assert abs(full.tasks[family] - score) <= A_POINT, family


def test_answers_are_those_of_one_stage_without_drafts_or_cache(full: EvaluationReport) -> None:
    """With as many ranks, as each quantises its own columns."""
    alone = evaluate(**SIZES, tensor_parallel_size=4, enable_prefix_caching=False, **FORMATS)
    assert full.tasks == alone.tasks
    assert full.wrong == alone.wrong
    assert full.num_output_tokens == alone.num_output_tokens
    assert full.cached_share is not None and full.cached_share > 0.3
    assert full.speculation is not None and full.speculation.counts.num_accepted_tokens > 0
