"""Errors that cross the wire by their code."""

from __future__ import annotations

import pytest

from radixkv import errors
from radixkv.errors import RequestError, request_error

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RequestError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_the_same_on_both_sides_of_the_wire(kind: type[RequestError]) -> None:
    error = request_error(kind.code, "what is wrong", param="stop")
    assert type(error) is kind
    assert (error.code, str(error), error.param) == (kind.code, "what is wrong", "stop")
