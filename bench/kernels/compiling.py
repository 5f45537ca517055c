"""Many kernels compiled at once, before they are timed."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch


def compile_together(calls: Sequence[Callable[[], object]], num_threads: int = 12) -> list[str]:
    """Run each call once, side by side; what a call could not do is its text, else ""."""

    def run(call: Callable[[], object]) -> str:
        try:
            call()
        except Exception as error:  # noqa: BLE001 (a line of the caller's table)
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return ""

    with ThreadPoolExecutor(num_threads) as threads:
        failures = list(threads.map(run, calls))
    torch.cuda.synchronize()
    return failures
