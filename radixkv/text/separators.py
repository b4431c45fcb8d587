"""Special tokens at which a text can be cut without changing its token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from radixkv.text.tokenizer_bounds import steps_of


def is_local(backend: tokenizers.Tokenizer) -> bool:
    """Returns whether a tokenizer is byte-level BPE of which no step reads beyond special tokens and words.

    NFC is applied to the texts between special tokens, as words are found there.
    """
    return (
        (backend.normalizer is None or isinstance(backend.normalizer, normalizers.NFC))
        and isinstance(backend.model, models.BPE)
        and not backend.model.dropout
        and all(backend.model.token_to_id(letter) is not None for letter in pre_tokenizers.ByteLevel.alphabet())
        and not any(
            token.lstrip or token.rstrip or token.single_word
            for token in backend.get_added_tokens_decoder().values()
        )
    )


def find_separators(backend: tokenizers.Tokenizer, token_ids: Iterable[int]) -> dict[str, int]:
    """Returns those of the tokens at which cutting a text never changes its ids: id by text.

    The ids of ``a<sep>b`` are those of ``a<sep>`` and of ``b`` for any texts, if no special tokens are added.
    """
    steps = steps_of(backend.pre_tokenizer, "pretokenizers")
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    if not is_byte_level or not is_local(backend) or not all(map(_is_plain, steps)):
        return {}
    added = backend.get_added_tokens_decoder()
    return {
        added[token_id].content: token_id
        for token_id in sorted(token_ids)
        if token_id in added and _is_separator(added[token_id], added.values())
    }


def _is_plain(step: Mapping[str, Any]) -> bool:
    """Returns whether a step treats the texts between special tokens alike, wherever they stand."""
    return step["type"] in ("Split", "Digits") or (step["type"] == "ByteLevel" and not step["add_prefix_space"])


def _is_separator(token: AddedToken, added: Iterable[AddedToken]) -> bool:
    """Returns whether a token is found wherever its text stands: no other token takes a part of that text first."""
    if not token.special or token.normalized:
        return False
    others = [other.content for other in added if other.content != token.content]
    return not any(token.content in other or _overlaps(other, token.content) for other in others)


def _overlaps(first: str, second: str) -> bool:
    """Returns whether an end of the first text is a beginning of the second one."""
    return any(second.startswith(first[start:]) for start in range(1, len(first)))
