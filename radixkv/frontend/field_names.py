"""The client's own names of fields, for errors that have ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from radixkv.errors import InvalidRequest

_OURS = "structured_outputs"
"""The name that the runtime has for what an answer must match, whichever field of the request said so."""


@contextmanager
def naming_fields(find_name: Callable[[str], str]) -> Iterator[None]:
    """Gives errors of the block the request's name of the field that they are about.

    Args:
        find_name: returns the request's name of one of our fields. Called for an error only.
    """
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None:
            error.param = find_name(error.param)
        raise


def naming_answer_format(field: str) -> AbstractContextManager[None]:
    """Gives errors of the block about what the answer must match the request's name of that field.

    The runtime finds these errors, when it compiles the grammar of a request.

    Args:
        field: the one that says what the answer must match, or ``tools`` if only calls must match something.
    """
    return naming_fields(lambda name: field if name == _OURS else name)
