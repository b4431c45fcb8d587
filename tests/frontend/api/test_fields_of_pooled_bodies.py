"""Tests that fields which would change vectors or scores are refused, unless they ask for what is done anyway."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from radixkv.errors import InvalidRequest, UnsupportedFeature
from radixkv.frontend.api.embeddings.schema import parse_embedding
from radixkv.frontend.api.rerank.schema import parse_rerank, parse_score

EMBEDDING, RERANKING, SCORE = {"input": "a"}, {"query": "a", "documents": ["b"]}, {"text_1": "a", "text_2": "b"}


@pytest.mark.parametrize(
    ("parse", "body", "field", "refused", "taken"),
    [
        (parse_embedding, EMBEDDING, "embedding_type", ["base64", "binary", "int8", ["ubinary"]], ["float", None]),
        (parse_embedding, EMBEDDING, "embedding_types", [["int8"], ["float", "int8"]], [["float"], []]),
        (parse_embedding, EMBEDDING, "output_dtype", ["int8", "ubinary"], ["float"]),
        (parse_embedding, EMBEDDING, "output_dimension", [16], [None]),
        (parse_embedding, EMBEDDING | {"dimensions": 16}, "output_dimension", [32], [16]),
        (parse_embedding, EMBEDDING | {"encoding_format": "base64"}, "embedding_type", ["int8"], ["base64"]),
        (parse_embedding, EMBEDDING, "normalize", [False], [True]),
        (parse_embedding, EMBEDDING, "normalized", [False], [True]),
        (parse_embedding, EMBEDDING, "use_activation", [False], [True]),
        (parse_embedding, EMBEDDING, "embed_dtype", ["float16", "bfloat16", "fp8_e4m3"], ["float32"]),
        (parse_embedding, EMBEDDING, "endianness", ["big"], ["native", "little"]),
        (parse_embedding, EMBEDDING, "late_chunking", [True], [False]),
        (parse_embedding, EMBEDDING, "instruction", ["Find it."], [None, ""]),
        (parse_embedding, EMBEDDING, "prompt_name", ["query"], [None]),
        (parse_embedding, EMBEDDING, "pooling", ["mean", "cls"], ["last", "lasttoken"]),
        (parse_score, SCORE, "use_activation", [False], [True]),
        (parse_score, SCORE, "apply_softmax", [False], [True]),
        (parse_score, SCORE, "label_token_ids", [[1, 2]], [None]),
        (parse_rerank, RERANKING, "instruct", ["Find it."], [None]),
        (parse_rerank, RERANKING, "chat_template", ["x"], [None]),
        (parse_rerank, RERANKING, "max_tokens_per_query", [9], [None]),
        (parse_score, SCORE, "activation", [False], [True]),
        (parse_score, SCORE, "softmax", [False], [True]),
        (parse_rerank, RERANKING, "use_activation", [False], [True]),
        (parse_rerank, RERANKING, "raw_scores", [True], [False]),
        (parse_rerank, RERANKING, "return_embeddings", [True], [False]),
    ],
)
def test_what_changes_the_result_is_refused_by_name(
    parse: Callable[[bytes, int], Any],
    body: dict[str, Any],
    field: str,
    refused: list[object],
    taken: list[object],
) -> None:
    for value in taken:
        parse(json.dumps(body | {field: value}).encode(), 100)
    for value in refused:
        with pytest.raises(UnsupportedFeature, match=f"^{field} ") as error:
            parse(json.dumps(body | {field: value}).encode(), 100)
        assert error.value.param == field


def test_a_wrong_format_is_told_those_that_there_are() -> None:
    for wrong in ("int8", "", "é"):
        with pytest.raises(InvalidRequest, match="^encoding_format must be float or base64$"):
            parse_embedding(json.dumps(EMBEDDING | {"encoding_format": wrong}).encode(), 100)
