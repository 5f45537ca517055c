"""Finding stop strings in a text that arrives bit by bit.

Owns an automaton over characters (Aho & Corasick, "Efficient string matching", CACM 1975): one
step a character, however many stop strings there are. Knows no token and no byte.
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
