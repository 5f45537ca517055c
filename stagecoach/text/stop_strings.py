"""Finding stop strings in a text that arrives bit by bit.

Owns an automaton over characters (Aho & Corasick, "Efficient string matching", CACM 1975): one
step a character, however many stop strings there are; and the filter that lets text through up
to the first. Knows no token and no byte.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    """The longest suffix of the text so far that begins some stop string."""

    depth: int
    next: dict[str, "_Node"] = field(default_factory=dict)
    shorter: "_Node | None" = None  # the next shorter such suffix; None at the root
    stop: str | None = None  # the longest stop string that ends here
    num_held: int = 0  # characters that may still grow into a stop string


class StopStrings:
    """The automaton and its place in one text.

    Of several stop strings the one that ends first counts; of those that end together, the
    longest.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """
        Raises:
            ValueError: a stop string is empty.
        """
        self._root = _build(list(stops))
        self._node = self._root

    @property
    def num_held(self) -> int:
        """How many of the newest characters are a beginning of a stop string."""
        return self._node.num_held

    def step(self, char: str) -> str | None:
        """Read one character; return the stop string that it completes, if any."""
        node = self._node
        while char not in node.next and node.shorter is not None:
            node = node.shorter
        self._node = node.next.get(char, self._root)
        return self._node.stop

    def restart(self) -> None:
        """Forget the text read so far."""
        self._node = self._root


class StopFilter:
    """Text up to the first stop string; a beginning of one is held back.

    Attributes:
        stop: the stop string that was found; nothing is returned beyond it.
    """

    def __init__(self, stops: Iterable[str], *, is_stop_kept: bool = False) -> None:
        """
        Raises:
            ValueError: a stop string is empty.
        """
        self.stop: str | None = None
        listed = list(stops)
        self._automaton = StopStrings(listed) if listed else None
        self._is_stop_kept = is_stop_kept
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Read text; return what is certain. A stop string that ends where none may is text."""
        if self.stop is not None:
            return ""
        if self._automaton is None:
            return text
        start = len(self._held)
        whole = self._held + text
        for end, char in enumerate(text, start=start + 1):
            stop = self._automaton.step(char)
            if stop is not None and may_stop:
                self.stop = stop
                self._held = ""
                return whole[: end if self._is_stop_kept else end - len(stop)]
        num_certain = len(whole) - self._automaton.num_held
        self._held = whole[num_certain:]
        return whole[:num_certain]

    def finish(self) -> str:
        """Return what is held back; the text that follows is another one."""
        held, self._held = self._held, ""
        if self._automaton is not None:
            self._automaton.restart()
        return held


def _build(stops: list[str]) -> _Node:
    root = _Node(depth=0)
    for stop in stops:
        if not stop:
            raise ValueError("stop: a stop string must not be empty")
        node = root
        for char in stop:
            if char not in node.next:
                node.next[char] = _Node(depth=node.depth + 1)
            node = node.next[char]
        node.stop = stop
    queue = deque(root.next.values())
    for child in queue:
        child.shorter = root
    while queue:
        node = queue.popleft()
        shorter = node.shorter
        assert shorter is not None
        # Breadth first, so whatever is shorter is complete already.
        node.stop = node.stop or shorter.stop
        node.num_held = node.depth if node.next else shorter.num_held
        for char, child in node.next.items():
            fallback: _Node | None = shorter
            while fallback is not None and char not in fallback.next:
                fallback = fallback.shorter
            child.shorter = root if fallback is None else fallback.next[char]
            queue.append(child)
    return root
