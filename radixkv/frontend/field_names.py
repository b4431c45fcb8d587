"""The client's own names of fields, for errors that have ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from radixkv.errors import InvalidRequest

_OURS = "structured_outputs"
"""The field in the runtime's errors about what an answer must match, whichever field the client used for it."""


@contextmanager
def naming_fields(find_name: Callable[[str], str]) -> Iterator[None]:
    """Inside the block, an error about one of our fields names the client's field instead.

    Args:
        find_name: returns the request's name of one of our fields. Called for an error only.
    """
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None:
            error.param = find_name(error.param)
        raise


@contextmanager
def numbering(index: int, n_prompts: int) -> Iterator[None]:
    """Inside the block, an error says that it is about prompt ``index``, if there are several."""
    try:
        yield
    except InvalidRequest as error:
        if n_prompts > 1:
            error.index = index
        raise


def naming_answer_format(field: str) -> AbstractContextManager[None]:
    """Inside the block, an error about ``structured_outputs`` names ``field`` instead.

    The runtime finds these errors when it compiles the grammar of a request.

    Args:
        field: the field by which the client said what the answer must match; ``tools`` if only calls must match
            something.
    """
    return naming_fields(lambda name: field if name == _OURS else name)
