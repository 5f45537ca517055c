"""Which page holds which block of which prefix, and which slot the state behind it.

Owns the tree of prefixes and its three kinds of entries. Knows neither which memory is free nor
who is evicted. A node is one full block behind its parent; the root of a tree stands for the
empty prefix of one salt. Every node but a root has a page, so what is under a node is whole:

    root --block 0--> node --block 1--> node            checkpoint at 2 * block_size + 3:
                      page              page, tail of    under the second node, by the three
                                        checkpoints      tokens behind it, with its tail page
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from stagecoach.cache.prefix_hash import BlockChain


@dataclass(slots=True, eq=False)
class Page:
    """A page that is not vacant: somebody holds it, the index knows it, or both."""

    page_id: int | None  # on the device; None: in the host tier
    host_id: int | None = None
    num_holders: int = 0  # requests, and the plan being made
    node: "Node | None" = None  # whose block it holds
    tails: "set[Checkpoint]" = field(default_factory=set)  # that end in it
    is_protected: bool = False
    is_bad: bool = False  # holds what must not be read: never cached, and cleared when freed
    stored_in: int = -1  # step that moved it to the host tier

    @property
    def is_cached(self) -> bool:
        return self.node is not None or bool(self.tails)


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The state after `position` tokens: a slot's state with `replay` rows of its record folded in.

    Immutable from the step that makes it until it is dropped.
    """

    position: int
    slot: int | None  # on the device; None: in the host tier
    replay: int
    step: int  # that makes it; later ones may read it
    owner: int
    host_slot: int | None = None
    node: "Node | None" = None  # the last full block before `position`; None: dropped
    tail: tuple[int, ...] = ()  # tokens behind that block
    tail_page: Page | None = None  # the page that they are in; None if there are none
    num_pins: int = 0
    num_hits: int = 0
    is_end: bool = False  # of a prompt or an answer: a conversation may go on from here
    is_protected: bool = False
    is_bad: bool = False
    stored_in: int = -1

    @property
    def is_indexed(self) -> bool:
        return self.node is not None

    def full_pages(self) -> list[Page]:
        """The full pages of its tokens, in their order; none once it is dropped."""
        pages = []
        node = self.node
        while node is not None and node.page is not None:
            pages.append(node.page)
            node = node.parent
        return pages[::-1]


@dataclass(slots=True, eq=False)
class Node:
    """One full block of tokens behind those of its parents."""

    name: bytes  # the chain's hash
    parent: "Node | None"
    page: Page | None  # None: a root
    owner: int
    children: "set[Node]" = field(default_factory=set)
    checkpoints: dict[tuple[int, ...], Checkpoint] = field(default_factory=dict)  # by tail


class Match(NamedTuple):
    """What the index has of a prefix."""

    checkpoint: Checkpoint | None
    num_blocks: int  # whose pages are there


class PrefixIndex:
    """The trees of all roots."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._nodes: dict[bytes, Node] = {}

    def __iter__(self) -> Iterator[Node]:
        yield from self._nodes.values()

    def get(self, name: bytes) -> Node | None:
        return self._nodes.get(name)

    def checkpoints(self) -> Iterator[Checkpoint]:
        for node in self._nodes.values():
            yield from node.checkpoints.values()

    def root(self, name: bytes) -> Node:
        """The root of that name, new if it is not there."""
        return self._nodes.get(name) or self._add(Node(name, None, None, owner=-1))

    def add_block(self, name: bytes, parent: Node, page: Page, owner: int) -> Node:
        """Index a page behind its parent."""
        assert page.node is None, f"a page of two blocks: {page.page_id}"
        node = self._add(Node(name, parent, page, owner))
        parent.children.add(node)
        page.node = node
        return node

    def replace_page(self, node: Node, page: Page, owner: int) -> Page:
        """Put an equal page in the place of a node's, its tails with it; returns the old one."""
        old = node.page
        assert old is not None and page.node is None, f"no page to replace: {node.name.hex()}"
        node.page, node.owner = page, owner
        page.node, old.node = node, None
        page.is_protected |= old.is_protected
        for checkpoint in old.tails:
            checkpoint.tail_page = page
        page.tails |= old.tails
        old.tails.clear()
        return old

    def add_checkpoint(
        self, checkpoint: Checkpoint, node: Node, tail: tuple[int, ...], tail_page: Page | None
    ) -> None:
        assert tail not in node.checkpoints, f"filed twice: position {checkpoint.position}"
        assert bool(tail) == (tail_page is not None), f"tail without page: {checkpoint.position}"
        node.checkpoints[tail] = checkpoint
        checkpoint.node, checkpoint.tail, checkpoint.tail_page = node, tail, tail_page
        if tail_page is not None:
            tail_page.tails.add(checkpoint)

    def remove_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Unindex a checkpoint; its tail page keeps its other users."""
        node = checkpoint.node
        assert node is not None, f"dropped twice: position {checkpoint.position}"
        del node.checkpoints[checkpoint.tail]
        checkpoint.node = None
        if checkpoint.tail_page is not None:
            checkpoint.tail_page.tails.remove(checkpoint)
        self._prune(node)

    def detach(self, top: Node) -> list[Node]:
        """Take a node and all under it out of the tree, the deepest first.

        Their pages and checkpoints are the caller's to drop.
        """
        if top.parent is not None:
            top.parent.children.remove(top)
            self._prune(top.parent)
        nodes = [top]
        for node in nodes:
            nodes.extend(node.children)
        for node in nodes:
            del self._nodes[node.name]
            node.children.clear()
        return nodes[::-1]

    def match(self, chain: BlockChain, limit: int, step: int) -> Match:
        """The deepest checkpoint at or before `limit` that a plan of number `step` may read.

        What the same plan makes or moves to the host tier is not there yet.
        """
        most_blocks = limit // self._block_size
        chain.hash_after(most_blocks)  # all in one go
        node = self._nodes.get(chain.hash_after(0))
        if node is None:
            return Match(None, 0)
        path = [node]
        for num_blocks in range(1, most_blocks + 1):
            node = self._nodes.get(chain.hash_after(num_blocks))
            if node is None or node.page is None or node.page.stored_in == step:
                break
            path.append(node)
        for num_blocks in range(len(path) - 1, -1, -1):
            if path[num_blocks].checkpoints:
                end = min(limit, (num_blocks + 1) * self._block_size - 1)
                checkpoint = _deepest(path[num_blocks], chain.tail(end), step)
                if checkpoint is not None:
                    return Match(checkpoint, len(path) - 1)
        return Match(None, len(path) - 1)

    def check_integrity(self) -> None:
        """Prove that the trees are whole and that every link has its other end."""
        roots = [node for node in self if node.parent is None]
        reached = list(roots)
        for node in reached:
            assert all(child.parent is node for child in node.children), f"{node.name.hex()}"
            reached.extend(node.children)
        assert {*map(id, reached)} == {*map(id, self)}, "nodes out of reach of a root"
        assert len(reached) == len(self._nodes), "a node with two parents"
        for name, node in self._nodes.items():
            assert node.name == name, f"under another name: {name.hex()}"
            is_root = node.parent is None
            assert is_root == (node.page is None), f"only roots have no page: {name.hex()}"
            assert not is_root or node.children or node.checkpoints, f"empty root: {name.hex()}"
            assert node.page is None or node.page.node is node, f"page of another: {name.hex()}"
            for tail, checkpoint in node.checkpoints.items():
                assert checkpoint.node is node and checkpoint.tail == tail, f"{checkpoint.position}"
                assert len(tail) == checkpoint.position % self._block_size, f"tail: {checkpoint}"
                page = checkpoint.tail_page
                assert (page is None) == (not tail), f"tail without page: {checkpoint.position}"
                assert page is None or checkpoint in page.tails, f"tail: {checkpoint.position}"

    def _add(self, node: Node) -> Node:
        assert node.name not in self._nodes, f"indexed twice: {node.name.hex()}"
        self._nodes[node.name] = node
        return node

    def _prune(self, node: Node) -> None:
        """Forget a root that nothing is under any more."""
        if node.parent is None and not node.children and not node.checkpoints:
            self._nodes.pop(node.name, None)


def _deepest(node: Node, following: tuple[int, ...], step: int) -> Checkpoint | None:
    """The deepest checkpoint of a node whose tail begins the tokens that follow it."""
    best: Checkpoint | None = None
    for tail, checkpoint in node.checkpoints.items():
        if (
            following[: len(tail)] == tail
            and checkpoint.step < step
            and checkpoint.stored_in != step
            and (checkpoint.tail_page is None or checkpoint.tail_page.stored_in != step)
            and (best is None or checkpoint.position > best.position)
        ):
            best = checkpoint
    return best
