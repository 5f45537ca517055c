"""An event loop whose time passes only while everybody sleeps, and then at once."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Passes the time instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits for nothing"
            self.now += max(timeout, 0.0)
        return ready


def run(main: Callable[[Callable[[], float]], Coroutine[Any, Any, T]]) -> T:
    """The result of `main(clock)`; `clock` tells the virtual seconds since the beginning."""
    selector = _Selector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(main(loop.time))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
