"""The most pages that a request with a ``kv_budget`` holds."""

from __future__ import annotations

_PAGES_IN_PASSING = 2
"""The page of the next token, which comes before one is dropped, and one that a launched step still reads."""


def most_pages(n_prompt: int, kv_budget: int, page_size: int) -> int:
    """Returns how many pages a request holds at most, however long its answer is.

    The cache may keep the pages of its prompt, and those of the answer before the first drop, while it runs. Beside
    them it has the pages that its rows read, which may all be of its answer.

    Args:
        n_prompt: tokens of the prompt.
        kv_budget: the most tokens that a row of the answer reads.
        page_size: tokens per page.
    """
    n_read = kv_budget // page_size
    return max(-(-n_prompt // page_size), n_read) + n_read + _PAGES_IN_PASSING


def largest_budget(n_prompt: int, n_pages: int, page_size: int) -> int:
    """Returns the largest ``kv_budget`` with which a request holds at most ``n_pages`` pages; 0 or less if none is.

    Args:
        n_prompt: tokens of the prompt.
        n_pages: pages that it may hold.
        page_size: tokens per page.
    """
    n_left = n_pages - _PAGES_IN_PASSING
    return min(n_left - -(-n_prompt // page_size), n_left // 2) * page_size
