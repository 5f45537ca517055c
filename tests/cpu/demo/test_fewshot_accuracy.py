"""The whole engine at once: stages, ranks, drafts and shared prefixes give the scores of none.

Solved examples stand before each question, so the questions of a family share a prefix.
"""

import pytest

from stagecoach.demo.evaluation import EvaluationReport
from tests.demo_answers import SPECULATION, evaluate

pytestmark = pytest.mark.cpu

SIZES = {"limit": 3, "seed": 1, "num_fewshot": 2, "max_num_seqs": 3}


@pytest.fixture(scope="module")
def full() -> EvaluationReport:
    return evaluate(
        **SIZES,
        pipeline_parallel_size=2,
        tensor_parallel_size=4,
        speculative_config=SPECULATION,
        debug_poison=True,
    )


def assert_same_answers(report: EvaluationReport, other: EvaluationReport) -> None:
    """Letter for letter where they are wrong, and of the same length in all."""
    assert report.tasks == other.tasks
    assert report.wrong == other.wrong
    assert report.num_output_tokens == other.num_output_tokens


def test_scores_are_those_of_one_stage_without_any_of_it(full: EvaluationReport) -> None:
    plain = evaluate(**SIZES, enable_prefix_caching=False)
    assert all(score > 0 for score in plain.tasks.values())
    assert_same_answers(full, plain)
    assert (plain.cached_share, plain.speculation) == (None, None)
    assert full.cached_share is not None and full.cached_share > 0.4


def test_acceptance_is_that_of_one_stage_without_a_cache(full: EvaluationReport) -> None:
    """The draft finds its context where a prefix was found, and is as often right."""
    uncached = evaluate(**SIZES, speculative_config=SPECULATION, enable_prefix_caching=False)
    assert_same_answers(full, uncached)
    assert full.speculation is not None and uncached.speculation is not None
    assert full.speculation == uncached.speculation
    assert full.speculation.counts.num_accepted_tokens > 0
