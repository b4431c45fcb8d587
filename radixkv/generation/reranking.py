"""Prompts of Qwen3-Reranker, which answers with ``yes`` or ``no`` whether a document meets a query.

A score is the probability of ``yes`` after the prompt, between these two tokens. The prompt is that of the model
card (Qwen/Qwen3-Reranker-0.6B): what pairs of one query have in common is at its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.errors import ConfigError, InvalidRequest, shortened
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import Pooling

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_SPECIAL = ("<|im_start|>", "<|im_end|>")
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def reranker_prompt(query: str, document: str, instruction: str) -> str:
    """Returns the prompt that asks whether a document meets a query, as ``instruction`` says what that means."""
    return f"{_BEFORE}<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}{_AFTER}"


def answer_pooling(tokenizer: Tokenizer | None) -> Pooling:
    """Returns the request for the logits of ``no`` and ``yes``.

    Raises:
        ConfigError: there is no tokenizer, or it has not both as tokens, or not those that begin and end messages.
    """
    ids = [] if tokenizer is None else [tokenizer.token_id(name) for name in ("no", "yes")]
    found = tuple(one for one in ids if one is not None)
    if tokenizer is None or len(found) != 2:
        raise ConfigError(
            "task score needs a tokenizer with the tokens yes and no, whose logits are the score; use a reranker "
            "such as Qwen/Qwen3-Reranker-0.6B, with its tokenizer"
        )
    if missing := [name for name in _SPECIAL if name not in tokenizer.special_ids(_SPECIAL)]:
        raise ConfigError(
            f"task score needs a tokenizer with the special token {missing[0]}, which the prompts of "
            "Qwen3-Reranker have; use a reranker such as Qwen/Qwen3-Reranker-0.6B, with its tokenizer"
        )
    return Pooling(found)


def text_pairs(
    queries: str | Sequence[str], documents: str | Sequence[str], fields: tuple[str, str]
) -> list[tuple[str, str]]:
    """Returns each document with its query: one query for all documents, or one for each.

    Args:
        queries: at least one.
        documents: at least one.
        fields: what errors call both.

    Raises:
        InvalidRequest: the numbers do not fit, or something is no text.
    """
    first, second = _texts(queries, fields[0]), _texts(documents, fields[1])
    if not second:
        raise InvalidRequest(f"{fields[1]} has no texts; give one or more", param=fields[1])
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"{fields[0]} has {len(first)} texts and {fields[1]} has {len(second)}; give one text, or as many "
            f"as {fields[1]}",
            param=fields[0],
        )
    return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


def _texts(given: object, field: str) -> list[str]:
    """Returns a text, or a list of texts, as a list."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
        raise InvalidRequest(f"{field} is {shortened(given)}; give a text, or a list of texts", param=field)
    for index, one in enumerate(given):
        if not isinstance(one, str):
            raise InvalidRequest(f"{field}[{index}] is {shortened(one)}; it must be text", param=field)
    return list(given)
