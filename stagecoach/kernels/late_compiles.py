"""Says in the log which kernel is compiled after an engine was ready, and why a step took long.

The rehearsal meets every form of every kernel (`runner/kernel_forms.py`), so that there is none.
"""

from typing import Any

from triton import knobs

from stagecoach.observe.log import get_logger

_LOG = get_logger(__name__)


def report_from_now_on() -> None:
    """One line for each compilation of this process; what lies in Triton's cache is none."""
    knobs.compilation.listener = _report


def _report(*, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        _LOG.info(
            "compiled a form of %s in %.1f s, for which a step waited; the next start finds it",
            metadata["name"],
            times.total / 1e6,
        )
