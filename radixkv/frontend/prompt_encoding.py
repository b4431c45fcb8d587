"""Texts and ids from clients to prompts' bytes, off the event loop where that takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import cast

from radixkv.errors import ContextLengthExceeded, InvalidRequest
from radixkv.frontend.http.body_decoder import check_prompt_count, mixed_prompt
from radixkv.frontend.served_model import Served
from radixkv.wire import pack_tokens

_INLINE_CHARACTERS = 512
"""Of texts that are encoded at once, which is sooner done than a change of threads;"""
_GATHERED_CHARACTERS = 1 << 15
"""longer ones are encoded with others that wait, and still longer ones alone, so that no other waits for them."""
_INLINE_IDS = 1 << 13
"""Of prompts, token ids that are looked at at once, which takes less than a millisecond."""


def separate(prompt: str | Sequence[str | int | Sequence[int]]) -> list[str | Sequence[int]]:
    """One item a prompt. Raises ``InvalidRequest``."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if not kinds:
        raise InvalidRequest("prompt is empty; give a string, strings, token ids or lists of them", param="prompt")
    if len(kinds) != 1:
        raise mixed_prompt()
    if kinds == {int}:
        return [cast(Sequence[int], prompt)]
    check_prompt_count(len(prompt))
    return list(cast(Sequence[str | Sequence[int]], prompt))


async def encode(
    prompts: Sequence[str | Sequence[int]], served: Served, *, adds_special_tokens: bool = True
) -> list[bytes]:
    """The little-endian int32 ids of prompts, which are all texts or all ids. Raises ``InvalidRequest``."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if texts:
        encoded = await encode_texts(texts, served, "prompt", adds_special_tokens=adds_special_tokens)
    elif sum(map(len, ids)) <= _INLINE_IDS:
        encoded = _packed(ids, served)
    else:
        encoded = await asyncio.to_thread(_packed, ids, served)
    if not all(encoded):
        raise InvalidRequest("a prompt is empty; it needs at least one token", param="prompt")
    return encoded


async def encode_texts(
    texts: Sequence[str], served: Served, field: str, *, adds_special_tokens: bool
) -> list[bytes]:
    """The ids of texts. Raises ``InvalidRequest`` for ``field``."""
    tokenizer, limit = served.tokenizer, served.max_prompt_and_answer
    if tokenizer is None:
        raise InvalidRequest(
            "this checkpoint has no tokenizer; give prompts as token ids, or start the server with --tokenizer",
            param=field,
        )
    if (longest := served.longest_token_characters) is not None:
        n_characters = max(map(len, texts))
        if n_characters > limit * longest:
            raise ContextLengthExceeded(
                f"the prompt has {n_characters} characters, but this model's maximum context length is {limit} "
                "tokens; shorten it",
                param=field,
            )

    n_characters = sum(map(len, texts))
    try:
        if n_characters <= _INLINE_CHARACTERS:
            return [tokenizer.encode_here(text, limit, adds_special_tokens=adds_special_tokens) for text in texts]
        if n_characters <= _GATHERED_CHARACTERS:
            return await served.encoder.encode(texts, adds_special_tokens=adds_special_tokens)
        encode_one = partial(tokenizer.encode, limit=limit, adds_special_tokens=adds_special_tokens)
        # Each text by itself, so that a client's leaving ends the rest.
        return [await served.alone.run(partial(encode_one, text)) for text in texts]
    except InvalidRequest as error:
        error.param = field
        raise


def check_ids(ids: Sequence[int], served: Served, field: str) -> None:
    """Raises ``InvalidRequest`` if an id is no token of the model."""
    if min(ids) < 0 or max(ids) >= served.ready.vocab_size:
        raise InvalidRequest(
            f"{field} has a token id outside the vocabulary of {served.ready.vocab_size}", param=field
        )


def _packed(prompts: Sequence[Sequence[int]], served: Served) -> list[bytes]:
    for ids in filter(None, prompts):
        check_ids(ids, served, "prompt")
    return list(map(pack_tokens, prompts))
