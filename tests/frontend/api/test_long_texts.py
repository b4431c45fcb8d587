"""Tests that a field with texts of a prompt may be as long as the body, not as short as other fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from radixkv.frontend.api.anthropic.schema import parse_messages
from radixkv.frontend.api.embeddings.schema import parse_embedding
from radixkv.frontend.api.openai.schema import parse_chat, parse_completion
from radixkv.frontend.api.rerank.schema import parse_rerank, parse_score
from radixkv.frontend.api.responses.schema import parse_responses
from radixkv.frontend.api.sglang.schema import parse_generate
from radixkv.frontend.http.body_decoder import MAX_FIELD_BYTES

TEXTS = ["x" * 1024] * 1024
TEXT = "".join(TEXTS)
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.mark.parametrize(
    ("parse", "field", "value", "others"),
    [
        (parse_rerank, "documents", TEXTS, {"query": "q"}),
        (parse_rerank, "documents", [{"text": text, "id": "7"} for text in TEXTS], {"query": "q"}),
        (parse_rerank, "documents", [TEXT], {"query": "q"}),
        (parse_rerank, "query", TEXT, {"documents": ["d"]}),
        (parse_score, "text_2", TEXTS, {"text_1": "q"}),
        (parse_score, "text_1", TEXTS, {"text_2": TEXTS}),
        (parse_embedding, "input", TEXTS, {}),
        (parse_embedding, "input", TEXT, {}),
        (parse_embedding, "input", [list(range(300))] * 1024, {}),
        (parse_completion, "prompt", TEXT, {}),
        (parse_completion, "prompt", [TEXT[: 1 << 19]] * 2, {}),
        (parse_chat, "messages", MESSAGES, {}),
        (parse_messages, "messages", MESSAGES, {"max_tokens": 1}),
        (parse_messages, "system", TEXT, {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}),
        (parse_responses, "input", TEXT, {}),
        (parse_responses, "instructions", TEXT, {"input": "a"}),
        (partial(parse_generate, misspelt={}), "text", TEXT, {}),
    ],
)
def test_a_megabyte_of_texts_is_taken(
    parse: Callable[[bytes, int], Any], field: str, value: object, others: dict[str, Any]
) -> None:
    body = json.dumps({"model": "m", field: value, **others}).encode()
    assert len(body) > 1 << 20 > MAX_FIELD_BYTES
    parse(body, 1 << 20)
