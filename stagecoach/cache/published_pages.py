"""Which pages of running requests become the index's, and when.

Owns the pages that a plan found to be there twice. Knows neither states nor who is evicted.
"""

from collections.abc import Sequence
from typing import NamedTuple

from stagecoach.cache.page_memory import PageMemory
from stagecoach.cache.prefix_hash import BlockChain
from stagecoach.cache.prefix_index import Node, Page, PrefixIndex


class _Duplicate(NamedTuple):
    """A request's page that holds the same tokens as a node's."""

    node: Node
    page: Page
    owner: int


class PublishedPages:
    """What requests give to the index."""

    def __init__(self, index: PrefixIndex, pages: PageMemory) -> None:
        self._index = index
        self._pages = pages
        self._duplicates: list[_Duplicate] = []

    def publish(
        self, chain: BlockChain, page_ids: Sequence[int], num_blocks: int, owner: int
    ) -> None:
        """Index a request's first pages, as of `PrefixCache.publish`.

        Args:
            page_ids: the request's page table.
            num_blocks: of them, that are full of committed tokens.
            owner: the admission that computed them.
        """
        if not num_blocks:
            return
        index = self._index
        start = chain.num_published
        # A node that is there has all its parents.
        if start > num_blocks or index.get(chain.hash_after(start)) is None:
            start = 0
        node = index.get(chain.hash_after(start))
        for number in range(start, num_blocks):
            page = self._pages.get(page_ids[number])
            found = index.get(chain.hash_after(number + 1))
            if found is not None:
                if found.page is not page:
                    self._duplicates.append(_Duplicate(found, page, owner))
                node = found
            elif page.is_bad:
                return
            else:
                parent = node or index.root(chain.hash_after(0))
                node = index.add_block(chain.hash_after(number + 1), parent, page, owner)
            chain.num_published = number + 1

    def replace_duplicates(self) -> None:
        """Let requests' pages stand for equal ones that nobody holds, which are freed.

        So what a running request needs is held as a whole: nothing of it is evicted above what
        it publishes behind.
        """
        duplicates, self._duplicates = self._duplicates, []
        index = self._index
        for node, page, owner in duplicates:
            is_there = index.get(node.name) is node and node.page is not None
            if is_there and page.num_holders and not (page.is_cached or page.is_bad):
                assert node.page is not None
                if not node.page.num_holders:
                    self._pages.settle(index.replace_page(node, page, owner))
