"""Page 0 stays what it is."""

import pytest

from stagecoach.cache.page_pool import NULL_PAGE, PagePool


def test_the_null_page_is_never_handed_out() -> None:
    pool = PagePool(5)
    assert pool.num_total == 4
    assert NULL_PAGE not in pool.take(4)
    with pytest.raises(AssertionError, match="page 0 freed while free"):
        pool.free([NULL_PAGE])


def test_a_pool_without_a_usable_page_is_refused() -> None:
    with pytest.raises(AssertionError, match="no page beside the null page"):
        PagePool(1)
