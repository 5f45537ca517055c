"""What a step costs: seconds of each stage against the shape of the plan.

Owns the table that is measured at start and kept current from live steps, and the formula from
stages to the pace of a pipeline. Pure arithmetic: knows no clock, no request and no plan.

Dimensions: M shapes that are asked about at once.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Live steps: the speed of a stage follows within a few, the form of its table within dozens.
# Once the speed is settled, a point that few steps were near follows sooner: the start may have
# measured it badly, and where drafting seems dear, windows with drafts are rare.
_SPEED_GAIN = 1 / 4
_LEAST_FORM_GAIN = 1 / 64
_STEPS_OF_START = 3.0
# Mean deviation, as a logarithm, below which a speed begins to count as settled.
_SETTLED = 0.2
_UNREST_GAIN = 1 / 8
# A step may be held up by another program; no single one counts more than this.
_MOST_DEVIATION = 2.0
_FIT_ROUNDS = 12
# Beyond any number of tokens: where a curve ends.
_FAR = 1e9


class StepShape(NamedTuple):
    """What of a plan of windows decides its cost."""

    num_tokens: int
    widest: int  # tokens of the widest window: the recurrence takes them one after another
    num_proposals: int  # blocks that the drafter proposes behind it


class MeasuredStep(NamedTuple):
    """A plan of that shape, alone in the pipeline."""

    shape: StepShape
    stage_seconds: tuple[float, ...]  # busy, not waiting for the stage before
    total_seconds: float  # from launch to result


class Curve:
    """A line through points that never falls; behind the last it goes on as before it.

    Args:
        xs: rising.
        ys: where a value is below the one before, that one counts.
    """

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        assert len(xs) == len(ys) and len(xs), f"points: {xs}, {ys}"
        assert all(a < b for a, b in pairwise((*xs, _FAR))), f"not rising: {xs}"
        values = np.maximum.accumulate(np.array(ys, dtype=np.float64)).tolist()
        slope = (values[-1] - values[-2]) / (xs[-1] - xs[-2]) if len(xs) > 1 else 0.0
        self._xs: Floats = np.array([*xs, _FAR], dtype=np.float64)
        self._ys: Floats = np.array([*values, values[-1] + slope * (_FAR - xs[-1])])
        self._num_steps: Floats = np.full(len(self._xs), _STEPS_OF_START)  # behind each point

    def __call__(self, xs_M: Floats | float) -> Floats:
        """[M] -> [M]; a number -> [], at most 1e9."""
        return np.asarray(np.interp(xs_M, self._xs, self._ys))

    def at(self, x: float) -> float:
        return float(np.interp(x, self._xs, self._ys))

    def bend(self, x: float, deviation: float, trust: float = 0.0) -> None:
        """Move the value at `x` towards `deviation` times as much.

        Its two neighbours move, each by as much as it is near.

        Args:
            trust: 0 to 1, that the deviation is the curve's: then points that few steps were
                near move far.
        """
        right = max(1, int(np.searchsorted(self._xs, x)))
        span = self._xs[right] - self._xs[right - 1]
        nearness = min(max((x - self._xs[right - 1]) / span, 0.0), 1.0)
        for point, share in ((right - 1, 1 - nearness), (right, nearness)):
            self._num_steps[point] += share
            gain = max(_LEAST_FORM_GAIN, trust / self._num_steps[point])
            self._ys[point] *= deviation ** (gain * share)
        self._ys = np.maximum.accumulate(self._ys)


class StageCost:
    """One stage: seconds against tokens, and what is added by the widest window.

    Args:
        tokens: seconds of a plan of windows of one token each.
        widths: further seconds against the tokens of the widest window; 0 at 1.
    """

    def __init__(self, tokens: Curve, widths: Curve) -> None:
        self.tokens = tokens
        self.widths = widths
        self.speed = 1.0  # of late, against the table: another clock rate, longer contexts
        self.unrest = 1.0  # how much steps deviate from that of late

    @property
    def trust(self) -> float:
        """0 to 1: that a deviation is not the speed's."""
        return max(0.0, 1.0 - self.unrest / _SETTLED)


class StepCost:
    """Seconds of a step on every stage, with the drafter's block pass on the last.

    Args:
        stages: first to last.
        block: further seconds of the last stage against proposals; 0 at 0.
        overhead_seconds: of a step alone in the pipeline, outside the stages.
    """

    def __init__(
        self, stages: Sequence[StageCost], block: Curve, overhead_seconds: float = 0.0
    ) -> None:
        assert stages, "a pipeline has a stage"
        self._stages = tuple(stages)
        self._block = block
        self._overhead_seconds = overhead_seconds

    @staticmethod
    def fit(measured: Sequence[MeasuredStep]) -> "StepCost":
        """The table behind measured steps.

        Among them must be plain steps (windows of one token, no proposals). Windows of several
        tokens are compared with plain steps of as many tokens; proposals with the same step
        without. What was not measured costs nothing more.
        """
        stages = [
            _fit_stage([(item.shape, item.stage_seconds[index]) for item in measured])
            for index in range(len(measured[0].stage_seconds))
        ]
        blocks: dict[float, float] = {0.0: 0.0}
        for item in measured:
            shape = item.shape
            if shape.num_proposals:
                without = _stage_seconds(stages[-1], shape)
                blocks[float(shape.num_proposals)] = item.stage_seconds[-1] - without
        overheads = [item.total_seconds - sum(item.stage_seconds) for item in measured]
        return StepCost(stages, _curve(blocks), max(0.0, float(np.median(overheads))))

    def seconds(self, shape: StepShape, num_in_flight: int = 1) -> float:
        """Time that one such step takes of a pipeline that has `num_in_flight` of them."""
        return float(
            self.seconds_each(
                np.array([shape.num_tokens], dtype=np.float64),
                np.array([shape.widest], dtype=np.float64),
                shape.num_proposals,
                num_in_flight,
            )[0]
        )

    def seconds_each(
        self,
        num_tokens_M: Floats,
        widest_M: Floats,
        num_proposals_M: Floats | float,
        num_in_flight: int,
    ) -> Floats:
        """Seconds between two results, if all steps were like that; `seconds` for many shapes.

        With one plan in flight a step takes the sum of its stages. With one a stage the slowest
        stage sets the pace, and the drafter's time counts only if the last stage is that one.
        Between the two, whichever is more: the slowest stage, or the sum shared by the plans.
        """
        busy = [
            (stage.tokens(num_tokens_M) + stage.widths(widest_M)) * stage.speed
            for stage in self._stages
        ]
        busy[-1] = busy[-1] + self._block(num_proposals_M) * self._stages[-1].speed
        seconds_M: Floats = np.sum(busy, axis=0)
        seconds_M = (seconds_M + self._overhead_seconds) / num_in_flight
        for stage_seconds_M in busy:
            seconds_M = np.maximum(seconds_M, stage_seconds_M)
        return seconds_M

    def note(self, shape: StepShape, stage_seconds: Sequence[float]) -> None:
        """Move the table towards a live step.

        A deviation is first taken for another speed of the stage, which every shape shares; only
        what one shape deviates from the others bends the table there. So a machine that slows
        down changes no decision, though only one kind of step is seen.
        """
        assert len(stage_seconds) == len(self._stages), f"a time a stage: {stage_seconds}"
        for index, (stage, seconds) in enumerate(zip(self._stages, stage_seconds, strict=True)):
            is_last = index == len(self._stages) - 1
            num_proposals = shape.num_proposals if is_last else 0
            expected = _stage_seconds(stage, shape) + self._block.at(num_proposals)
            if seconds <= 0 or expected <= 0:
                continue
            deviation = seconds / (expected * stage.speed)
            deviation = min(max(deviation, 1 / _MOST_DEVIATION), _MOST_DEVIATION)
            trust = stage.trust
            stage.unrest += _UNREST_GAIN * (abs(math.log(deviation)) - stage.unrest)
            stage.speed *= deviation**_SPEED_GAIN
            stage.tokens.bend(shape.num_tokens, deviation, trust)
            stage.widths.bend(shape.widest, deviation, trust)
            if num_proposals:
                self._block.bend(num_proposals, deviation, trust)


class BatchCost:
    """Cost of a batch of windows in plain steps of the same batch.

    Args:
        cost: of the running pipeline.
        num_windows: windows of one plan.
        num_places: k, the most drafts of a window.
        num_in_flight: plans in flight at once.
    """

    def __init__(
        self, cost: StepCost, *, num_windows: int, num_places: int, num_in_flight: int
    ) -> None:
        self.num_windows = num_windows
        self.num_in_flight = num_in_flight
        self._cost = cost
        # The first without proposals, which is the plain step.
        drafts_K = np.maximum(np.arange(-1.0, num_places + 1.0), 0.0)
        proposals_K = np.full_like(drafts_K, num_windows)
        proposals_K[0] = 0.0
        plain, *seconds = cost.seconds_each(
            num_windows * (1 + drafts_K), 1 + drafts_K, proposals_K, num_in_flight
        ).tolist()
        self._plain_seconds = plain
        self._uniform = [item / plain for item in seconds]

    def mixed(self, num_drafts_M: Floats, longest_M: Floats, num_drafting_M: Floats) -> Floats:
        """[M] drafts in all, [M] of the longest window, [M] requests that draft -> [M]."""
        num_tokens_M = self.num_windows + num_drafts_M
        seconds_M = self._cost.seconds_each(
            num_tokens_M, 1 + longest_M, num_drafting_M, self.num_in_flight
        )
        return seconds_M / self._plain_seconds

    def uniform(self, num_drafts: float) -> float:
        """If every window has so many drafts, at most k, also as a mean."""
        # A mean of k may round to more.
        whole = min(int(num_drafts), len(self._uniform) - 2)
        part = min(1.0, num_drafts - whole)
        return self._uniform[whole] + part * (self._uniform[whole + 1] - self._uniform[whole])


def _fit_stage(measured: Sequence[tuple[StepShape, float]]) -> StageCost:
    unproposed = [(shape, seconds) for shape, seconds in measured if not shape.num_proposals]
    plain = {float(shape.num_tokens): y for shape, y in unproposed if shape.widest == 1}
    single = [item for item in unproposed if 1 < item[0].widest == item[0].num_tokens]
    wide = [item for item in unproposed if 1 < item[0].widest < item[0].num_tokens]
    # Beyond plain steps the two curves are known by their sums alone. Start as if further tokens
    # cost nothing, and take in turn from one what the other explains.
    points = dict.fromkeys((float(shape.num_tokens) for shape, _ in wide), max(plain.values()))
    stage = StageCost(_curve(points | plain), _curve({1.0: 0.0}))
    for _ in range(_FIT_ROUNDS):
        widths = {1.0: 0.0}
        for shape, seconds in single:
            widths[float(shape.widest)] = seconds - stage.tokens.at(shape.num_tokens)
        stage.widths = _curve(widths)
        for shape, seconds in wide:
            points[float(shape.num_tokens)] = seconds - stage.widths.at(shape.widest)
        stage.tokens = _curve(points | plain)
    return stage


def _stage_seconds(stage: StageCost, shape: StepShape) -> float:
    return stage.tokens.at(shape.num_tokens) + stage.widths.at(shape.widest)


def _curve(points: dict[float, float]) -> Curve:
    xs = sorted(points)
    return Curve(xs, [points[x] for x in xs])
