"""Pages of MLA cache, by number: which are free.

A page holds a fixed number of tokens of every MLA layer of a stage; its number is the same on
all stages and ranks. Owns no content and knows no request; what a page that is not free is
used for is `page_memory.py`'s to know.
"""

from stagecoach.cache.id_pool import IdPool

# Page 0 holds zeros for ever: padded rows of page tables point at it. It is never written.
NULL_PAGE = 0
NUM_RESERVED_PAGES = 1


class PagePool(IdPool):
    """Pages 1..num_pages-1; page 0 is the null page and is never handed out."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages > NUM_RESERVED_PAGES, f"no page beside the null page: {num_pages}"
        super().__init__("page", NUM_RESERVED_PAGES, num_pages)
