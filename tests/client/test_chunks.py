"""Invalid events of a stream."""

import json

import pytest

from radixkv.client.chunks import read_chunk
from radixkv.client.errors import BadReply

DEEP = "[" * 100_000 + "]" * 100_000


def choice(**fields):
    return json.dumps({"choices": [{"index": 0, "text": "a", **fields}]}).encode()


def usage(**counts):
    return json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, **counts}}).encode()


@pytest.mark.parametrize(
    "event",
    [
        choice(token_ids=[1 << 31]),
        choice(token_ids=[-1]),
        usage(prompt_tokens=10**400),
        usage(completion_tokens=-2),
        usage(prompt_tokens_details={"cached_tokens": -1}),
        b'{"choices": [], "error": ' + DEEP.encode() + b"}",
    ],
)
def test_invalid_counts_and_ids_fail_the_request(event):
    with pytest.raises(BadReply, match="an event is not a completion chunk"):
        read_chunk(event)
