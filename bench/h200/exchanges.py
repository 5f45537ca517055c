"""How long the ranks of a stage wait for each other at every exchange of a step.

Owns the pairing of two ranks' traces. Both see the same exchanges in the same order, and an
exchange ends on both at nearly the same moment, which makes one clock of their two. A rank waits
from its own begin to the later of the two begins; what remains is the exchange itself.
"""

from bisect import bisect_left
from collections.abc import Callable
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

EXCHANGES = ("exchange_kernel", "exchange_words_kernel")
_NUM_POSITIONS_SHOWN = 10

# (name, begin, microseconds) of a kernel, by begin.
Kernel = tuple[str, float, float]


class Exchange(NamedTuple):
    """One exchange as one rank saw it; microseconds."""

    name: str
    behind: str  # the kernel before it
    begin: float
    end: float
    work: float  # in which a kernel ran since the exchange before
    idle: float  # in which none did
    is_first: bool  # of a step


class Pair(NamedTuple):
    """One exchange as both ranks saw it, on the first one's clock."""

    first: Exchange
    second: Exchange
    skew: float  # how much later the second came

    @property
    def waits(self) -> tuple[float, float]:
        return max(0.0, self.skew), max(0.0, -self.skew)

    @property
    def itself(self) -> float:
        """The shorter of the two: whoever came last waited for nobody."""
        return min(self.first.end - self.first.begin, self.second.end - self.second.begin)


def exchanges_of(kernels: list[Kernel]) -> list[Exchange]:
    """All but the first of a trace. A step begins behind the last choice of tokens or at a copy.

    Args:
        kernels: of one rank.
    """
    found = []
    work = idle = 0.0
    behind, last_end, is_first, has_begun = "", kernels[0][1] if kernels else 0.0, False, False
    for name, begin, duration in kernels:
        idle += max(0.0, begin - last_end)
        end = begin + duration
        if name in EXCHANGES:
            if has_begun:
                found.append(Exchange(name, behind, begin, end, work, idle, is_first))
            work = idle = 0.0
            has_begun, is_first = True, False
        else:
            work += max(0.0, end - max(begin, last_end))
            # The packed inputs of a step are its one copy to the device.
            is_first = is_first or "HtoD" in name
        behind, last_end = name, max(last_end, end)
    return found


def pair(first: list[Exchange], second: list[Exchange], most_shift: int = 200) -> list[Pair]:
    """The exchanges that both traces hold.

    Recording begins and ends at other moments on each rank, so the second list is shifted until
    the ends agree best; their clocks say about how far.
    """
    if not first or not second:
        return []
    ends = [item.end for item in second]
    # Positive: so many of the second come before all of the first.
    guess = bisect_left(ends, first[0].end)
    if not guess:
        guess = -bisect_left([item.end for item in first], ends[0])
    shifts = range(guess - most_shift, guess + most_shift + 1)
    candidates = [_shifted(first, second, shift) for shift in shifts]
    num_most = max(map(len, candidates))
    candidates = [pairs for pairs in candidates if len(pairs) > num_most // 2 and _is_alike(pairs)]
    if not candidates:
        return []
    best = min(candidates, key=_disagreement)
    offset = median(later.end - earlier.end for earlier, later in best)
    return [Pair(earlier, later, later.begin - offset - earlier.begin) for earlier, later in best]


def _shifted(
    first: list[Exchange], second: list[Exchange], shift: int
) -> list[tuple[Exchange, Exchange]]:
    if shift < 0:
        return list(zip(first[-shift:], second, strict=False))
    return list(zip(first, second[shift:], strict=False))


def _is_alike(pairs: list[tuple[Exchange, Exchange]]) -> bool:
    return all(earlier.name == later.name for earlier, later in pairs)


def _disagreement(pairs: list[tuple[Exchange, Exchange]]) -> float:
    """Clocks of one host differ by little: a whole step's shift is none of them."""
    differences = [later.end - earlier.end for earlier, later in pairs]
    middle = median(differences)
    return fmean(abs(item - middle) for item in differences) + 0.01 * abs(middle)


def summarize(pairs: list[Pair]) -> dict[str, Any]:
    """Waits by position in the step and by the kernel before; those of a step are medians.

    Returns:
        `positions`: of exchange 0 and so on of a step; `behind`: of all exchanges behind one
        kernel; each with the mean and the 95th percentile of both ranks' waits, the time of the
        exchange itself, and what each rank ran and idled since the exchange before.
    """
    steps = _steps(pairs)
    positions = [
        {"position": number, **_row([step[number] for step in steps])}
        for number in range(min(map(len, steps), default=0))
    ]
    names = dict.fromkeys((item.first.behind, item.first.is_first) for item in pairs)
    behind = [
        _row([item for item in pairs if (item.first.behind, item.first.is_first) == name])
        for name in names
    ]

    def a_step(value: Callable[[Pair], float]) -> float:
        return median(sum(map(value, step)) for step in steps) if steps else 0.0

    return {
        "num_steps": len(steps),
        "wait_us_a_step": [a_step(lambda item, rank=rank: item.waits[rank]) for rank in (0, 1)],
        "longest_wait_us": [
            max((item.waits[rank] for item in pairs), default=0.0) for rank in (0, 1)
        ],
        "itself_us_a_step": a_step(lambda item: item.itself),
        "work_us_a_step": [a_step(lambda item, rank=rank: item[rank].work) for rank in (0, 1)],
        "idle_us_a_step": [a_step(lambda item, rank=rank: item[rank].idle) for rank in (0, 1)],
        "positions": positions,
        "behind": behind,
    }  # fmt: skip


def _steps(pairs: list[Pair]) -> list[list[Pair]]:
    """Whole steps; those at both ends of a recording are not."""
    steps: list[list[Pair]] = []
    for item in pairs:
        if item.first.is_first:
            steps.append([])
        if steps:
            steps[-1].append(item)
    whole = steps[:-1]
    usual = median(map(len, whole)) if whole else 0
    return [step for step in whole if len(step) == usual]


def _row(items: list[Pair]) -> dict[str, Any]:
    waits = [[item.waits[rank] for item in items] for rank in (0, 1)]
    return {
        "kernel": items[0].first.name,
        "behind": items[0].first.behind,
        "is_first": items[0].first.is_first,
        "count": len(items),
        "wait_us": [round(fmean(values), 1) for values in waits],
        "wait_p95_us": [round(_p95(values), 1) for values in waits],
        "itself_us": round(fmean(item.itself for item in items), 1),
        "work_us": [round(fmean(item[rank].work for item in items), 1) for rank in (0, 1)],
        "idle_us": [round(fmean(item[rank].idle for item in items), 1) for rank in (0, 1)],
    }


def _p95(values: list[float]) -> float:
    return quantiles(values, n=20)[-1] if len(values) > 1 else values[0]


def table(summary: dict[str, Any]) -> list[str]:
    """Lines to print: the sums of a step, and where most is waited."""
    waits, work, idle = (summary[f"{name}_us_a_step"] for name in ("wait", "work", "idle"))
    longest = summary["longest_wait_us"]
    lines = [
        f"-- exchanges of {summary['num_steps']} steps, us a step on rank 0 | rank 1: "
        f"wait {waits[0]:.0f} | {waits[1]:.0f}, itself {summary['itself_us_a_step']:.0f}, "
        f"work {work[0]:.0f} | {work[1]:.0f}, idle {idle[0]:.0f} | {idle[1]:.0f}; "
        f"longest wait {longest[0]:.0f} | {longest[1]:.0f}",
        "     n  wait us, mean  wait us, p95   itself  work us since    idle us since   behind",
    ]
    lines += [_line(f"{row['count']:6}", row) for row in summary["behind"]]
    most = sorted(summary["positions"], key=lambda row: -sum(row["wait_us"]))
    lines += [_line(f"#{row['position']:<5}", row) for row in most[:_NUM_POSITIONS_SHOWN]]
    return lines


def _line(label: str, row: dict[str, Any]) -> str:
    def both(name: str) -> str:
        return " |".join(f"{value:6.1f}" for value in row[name])

    return (
        f"{label}  {both('wait_us')}  {both('wait_p95_us')}  {row['itself_us']:6.1f}"
        f"  {both('work_us')}  {both('idle_us')}  {row['behind'][-28:]}"
        f"{' (first of a step)' if row['is_first'] else ''}"
    )
