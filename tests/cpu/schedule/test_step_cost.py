"""The cost table: what is measured comes out again, and live steps move it where they must."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.engine.step_profile import make_ladder
from stagecoach.schedule.step_cost import (
    BatchCost,
    Curve,
    MeasuredStep,
    StageCost,
    StepCost,
    StepShape,
)
from tests.cpu.schedule.draft_traffic import step_cost

pytestmark = pytest.mark.cpu


def test_a_curve_goes_through_its_points_never_falls_and_goes_on() -> None:
    curve = Curve([1, 2, 4, 8], [1.0, 3.0, 2.0, 5.0])
    assert [curve.at(x) for x in (0, 1, 1.5, 2, 4, 6, 8)] == [1, 1, 2, 3, 3, 4, 5]
    assert curve.at(12) == pytest.approx(7.0)
    assert curve(np.array([2.0, 12.0])).tolist() == pytest.approx([3.0, 7.0])


def test_a_curve_of_one_point_is_flat() -> None:
    assert [Curve([4], [2.0]).at(x) for x in (1, 4, 100)] == [2.0] * 3


@given(
    st.lists(st.floats(0.01, 10), min_size=2, max_size=6),
    st.lists(st.tuples(st.floats(0, 20), st.floats(0.5, 2)), max_size=20),
)
def test_a_bent_curve_still_never_falls(ys: list[float], bends: list[tuple[float, float]]) -> None:
    curve = Curve(list(range(1, len(ys) + 1)), ys)
    for x, factor in bends:
        curve.bend(x, factor)
    values = curve(np.arange(0.0, 20.0, 0.25))
    assert (np.diff(values) >= 0).all() and np.isfinite(values).all()


def true_seconds(shape: StepShape, stage: int) -> float:
    """Two stages whose fixed costs differ; the drafter is on the second."""
    seconds = (0.5, 0.8)[stage] + 0.05 * shape.num_tokens + 0.2 * (shape.widest - 1)
    if stage == 1 and shape.num_proposals:
        seconds += 0.4 + 0.03 * shape.num_proposals
    return seconds


def measure(shapes: list[StepShape]) -> StepCost:
    steps = []
    for shape in shapes:
        stage_seconds = (true_seconds(shape, 0), true_seconds(shape, 1))
        steps.append(MeasuredStep(shape, stage_seconds, sum(stage_seconds) + 0.25))
    return StepCost.fit(steps)


@pytest.mark.parametrize("max_windows", [1, 2, 3, 16, 40])
@pytest.mark.parametrize("max_drafts", [0, 1, 3, 7])
def test_a_fit_gives_back_what_was_measured(max_windows: int, max_drafts: int) -> None:
    ladder = make_ladder(
        max_windows=max_windows, max_drafts=max_drafts, max_num_batched_tokens=4096
    )
    cost = measure([rung.shape for rung in ladder])
    for rung in ladder:
        expected = sum(true_seconds(rung.shape, stage) for stage in (0, 1)) + 0.25
        assert cost.seconds(rung.shape) == pytest.approx(expected, rel=1e-3), rung


def test_between_measured_shapes_a_linear_pipeline_is_met_exactly() -> None:
    ladder = make_ladder(max_windows=64, max_drafts=7, max_num_batched_tokens=4096)
    cost = measure([rung.shape for rung in ladder])
    for shape in (StepShape(23, 1, 0), StepShape(30, 5, 9), StepShape(300, 8, 40)):
        expected = sum(true_seconds(shape, stage) for stage in (0, 1)) + 0.25
        assert cost.seconds(shape) == pytest.approx(expected, rel=1e-6)


def test_a_full_pipeline_has_the_pace_of_its_slowest_stage() -> None:
    flat = Curve([1], [0.0])
    cost = StepCost(
        [StageCost(Curve([1], [3.0]), flat), StageCost(Curve([1], [1.0]), flat)],
        block=Curve([0, 1, 2], [0.0, 1.5, 4.0]),
        overhead_seconds=0.5,
    )
    plain, proposing, busy = (StepShape(1, 1, number) for number in (0, 1, 2))
    assert [cost.seconds(shape) for shape in (plain, proposing, busy)] == [4.5, 6.0, 8.5]
    # The drafter hides behind the first stage until the last becomes the slowest.
    assert [cost.seconds(shape, 2) for shape in (plain, proposing, busy)] == [3.0, 3.0, 5.0]


def test_with_few_plans_in_flight_they_share_the_way() -> None:
    stages = [StageCost(Curve([1], [1.0]), Curve([1], [0.0])) for _ in range(4)]
    cost = StepCost(stages, Curve([0], [0.0]))
    assert [cost.seconds(StepShape(1, 1, 0), number) for number in (1, 2, 4)] == [4, 2, 1]


def test_a_slower_machine_changes_no_comparison() -> None:
    cost = step_cost()
    plain, window = StepShape(1, 1, 0), StepShape(8, 8, 1)
    before = cost.seconds(window) / cost.seconds(plain)
    for _ in range(50):
        cost.note(window, [3 * 2.45])
    assert cost.seconds(window) == pytest.approx(3 * 2.45, rel=0.01)
    assert cost.seconds(window) / cost.seconds(plain) == pytest.approx(before, rel=0.1)


def test_a_shape_that_costs_more_than_the_others_bends_the_table() -> None:
    cost = step_cost()
    plain, window = StepShape(1, 1, 0), StepShape(8, 8, 1)
    for _ in range(300):
        cost.note(plain, [1.0])
        cost.note(window, [4.0])
    assert cost.seconds(window) / cost.seconds(plain) == pytest.approx(4.0, rel=0.2)


def test_the_block_pass_is_learnt_from_the_last_stage_alone() -> None:
    cost = step_cost(num_stages=2)
    plain, proposing = StepShape(1, 1, 0), StepShape(1, 1, 1)
    for _ in range(300):
        cost.note(plain, [0.5, 0.5])
        cost.note(proposing, [0.5, 1.5])
    assert cost.seconds(proposing) - cost.seconds(plain) == pytest.approx(1.0, rel=0.25)
    assert cost.seconds(plain) == pytest.approx(1.0, rel=0.25)


def test_what_the_start_measured_badly_is_soon_put_right_by_rare_steps() -> None:
    plain, window = StepShape(1, 1, 0), StepShape(8, 8, 0)
    # The start took a window for four times as dear as it is.
    cost = StepCost.fit([MeasuredStep(plain, (1.0,), 1.0), MeasuredStep(window, (8.0,), 8.0)])
    for _ in range(12):
        for _ in range(50):
            cost.note(plain, [1.0])
        assert cost.seconds(plain) == pytest.approx(1.0, rel=0.05)
        cost.note(window, [2.0])
    assert cost.seconds(window) < 3.5


def test_one_hiccup_counts_little_and_a_time_of_zero_nothing() -> None:
    cost = step_cost()
    before = cost.seconds(StepShape(1, 1, 0))
    cost.note(StepShape(1, 1, 0), [0.0])
    assert cost.seconds(StepShape(1, 1, 0)) == before
    cost.note(StepShape(1, 1, 0), [1000.0])
    assert cost.seconds(StepShape(1, 1, 0)) < 1.3 * before


def test_the_cost_of_a_batch_is_in_plain_steps_of_that_batch() -> None:
    cost = step_cost(token=0.1, width=0.05, block=0.4, block_token=0.0)
    batch = BatchCost(cost, num_windows=11, num_places=3, num_in_flight=1)
    assert batch.uniform(0) == pytest.approx(2.4 / 2.0)
    assert batch.uniform(3) == pytest.approx((2.0 + 33 * 0.1 + 3 * 0.05 + 0.4) / 2.0)
    assert batch.uniform(1.5) == pytest.approx((batch.uniform(1) + batch.uniform(2)) / 2)
    assert batch.uniform(3.0000001) == pytest.approx(batch.uniform(3))
    one = batch.mixed(np.array([0.0, 3.0]), np.array([0.0, 3.0]), np.array([0.0, 1.0]))
    assert one.tolist() == pytest.approx([1.0, (2.0 + 0.3 + 0.15 + 0.4) / 2.0])
