"""Where prompts are encoded: on the event loop, in a batch with others, or in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import cast

from radixkv.errors import InvalidRequest, context_length_exceeded
from radixkv.frontend.http.body_decoder import check_prompt_count, mixed_prompt_error
from radixkv.frontend.served_model import ServedModel
from radixkv.generation.prompts import encode_ids

_MAX_INLINE_CHARACTERS = 512
"""Up to this many characters, tokenize on the event loop: cheaper than a thread switch."""
_MAX_BATCHED_CHARACTERS = 1 << 15
"""Up to this many characters, tokenize in a batch with other requests.

Longer texts are tokenized one at a time, so that no other request waits for them.
"""
_MAX_INLINE_IDS = 1 << 13
"""Up to this many token ids, check them on the event loop: it takes less than a millisecond."""


def split_prompts(prompt: str | Sequence[str | int | Sequence[int]]) -> list[str | Sequence[int]]:
    """Splits a ``prompt`` field into one item per prompt. Raises ``InvalidRequest``."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if not kinds:
        raise InvalidRequest("prompt is empty; give a string, strings, token ids or lists of them", param="prompt")
    if len(kinds) != 1:
        raise mixed_prompt_error()
    if kinds == {int}:
        return [cast(Sequence[int], prompt)]
    check_prompt_count(len(prompt))
    return list(cast(Sequence[str | Sequence[int]], prompt))


async def encode_prompts(
    prompts: Sequence[str | Sequence[int]], served_model: ServedModel, *, adds_special_tokens: bool = True
) -> list[bytes]:
    """Encodes prompts, all texts or all token ids, to little-endian int32 ids. Raises ``InvalidRequest``."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if texts:
        encoded = await encode_texts(texts, served_model, "prompt", adds_special_tokens=adds_special_tokens)
    elif sum(map(len, ids)) <= _MAX_INLINE_IDS:
        encoded = [encode_ids(each, served_model) for each in ids]
    else:
        encoded = await asyncio.to_thread(lambda: [encode_ids(each, served_model) for each in ids])
    if not all(encoded):
        raise InvalidRequest("a prompt is empty; it needs at least one token", param="prompt")
    return encoded


async def encode_texts(
    texts: Sequence[str], served_model: ServedModel, field: str, *, adds_special_tokens: bool
) -> list[bytes]:
    """Encodes texts to little-endian int32 ids. Raises ``InvalidRequest`` with ``field`` as ``param``."""
    tokenizer, limit = served_model.require_tokenizer(field), served_model.max_prompt_and_answer
    if (longest := served_model.max_token_characters) is not None:
        n_characters = max(map(len, texts))
        if n_characters > limit * longest:
            raise context_length_exceeded(f"it has {n_characters} characters", limit, param=field)

    n_characters = sum(map(len, texts))
    try:
        if n_characters <= _MAX_INLINE_CHARACTERS:
            return [tokenizer.encode_inline(text, limit, adds_special_tokens=adds_special_tokens) for text in texts]
        if n_characters <= _MAX_BATCHED_CHARACTERS:
            return await served_model.batch_tokenizer.encode(texts, adds_special_tokens=adds_special_tokens)
        encode_one = partial(tokenizer.encode, limit=limit, adds_special_tokens=adds_special_tokens)
        # One call per text, so that a client's disconnect cancels the remaining ones.
        return [await served_model.serial.run(partial(encode_one, text)) for text in texts]
    except InvalidRequest as error:
        error.param = field
        raise
