"""Encoding of prompts: on the event loop, in a batch with others, or in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

from radixkv.errors import ContextLengthExceeded, InvalidRequest, context_length_exceeded
from radixkv.frontend.field_names import numbering
from radixkv.frontend.http.body_decoder import MAX_PROMPTS, check_prompt_count, mixed_prompt_error
from radixkv.frontend.kept_answers import AnswerKeeper, History, KeptAnswers
from radixkv.frontend.served_model import ServedModel
from radixkv.text.segment_cache import batches
from radixkv.wire.namespace import CacheNamespace

_MAX_INLINE_CHARACTERS = 512
"""Up to this many characters, tokenize on the event loop: cheaper than a thread switch."""
_MAX_BATCHED_CHARACTERS = 1 << 15
"""Up to this many characters, tokenize in a batch with other requests.

Longer texts are tokenized one at a time, so that no other request waits for them.
"""
_MAX_INLINE_IDS = 1 << 13
"""Up to this many token ids, check them on the event loop: it takes less than a millisecond."""


def split_prompts(
    prompt: str | Sequence[str | int | Sequence[int]], field: str = "prompt", max_prompts: int = MAX_PROMPTS
) -> list[str | Sequence[int]]:
    """Splits a field with prompts into one item per prompt. Raises ``InvalidRequest``, which names the field."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if not kinds:
        raise InvalidRequest(f"{field} is empty; give a string, strings, token ids or lists of them", param=field)
    if len(kinds) != 1:
        raise mixed_prompt_error(field)
    if kinds == {int}:
        return [cast(Sequence[int], prompt)]
    check_prompt_count(len(prompt), field, max_prompts)
    return list(cast(Sequence[str | Sequence[int]], prompt))


class EncodedConversation(NamedTuple):
    """The tokens of a rendered conversation."""

    tokens: bytes
    """Little-endian int32 ids."""
    kept_answers: KeptAnswers | None = None
    """Where its answers are kept; None if they are not."""
    history: History | None = None
    """What was found there."""

    @property
    def turn(self) -> str:
        """Id of the request from whose answer the conversation goes on; empty if that is not known."""
        return "" if self.history is None else self.history.turn

    def open_keeper(self, turn: str) -> AnswerKeeper | None:
        """Returns what keeps the answers to the request ``turn``; None if they are not kept."""
        if self.kept_answers is None or self.history is None:
            return None
        return self.kept_answers.open_keeper(self.history, self.tokens, turn)


@dataclass(frozen=True, kw_only=True)
class PromptEncoder:
    """Encodes the prompts of one request: on the event loop, in a batch with others, or in a thread."""

    served_model: ServedModel
    tenant: str
    """Who has sent the request."""
    cache_salt: str = ""
    field: str = "prompt"
    """The field of the request that errors name."""
    adds_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens to texts."""

    async def prompts(self, prompts: Sequence[str | Sequence[int]]) -> list[bytes]:
        """Encodes prompts, all texts or all token ids, to little-endian int32 ids.

        Raises:
            InvalidRequest: of several prompts, it has the number of one that is refused.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
        if texts:
            encoded = await self.texts(texts)
        elif sum(map(len, ids)) <= _MAX_INLINE_IDS:
            encoded = self._ids(ids)
        else:
            encoded = await asyncio.to_thread(self._ids, ids)
        for index, tokens in enumerate(encoded):
            with numbering(index, len(encoded)):
                if not tokens:
                    raise InvalidRequest("the prompt is empty; it needs at least one token", param=self.field)
        return encoded

    def _ids(self, prompts: Sequence[Sequence[int]]) -> list[bytes]:
        encoded = []
        for index, ids in enumerate(prompts):
            with numbering(index, len(prompts)):
                encoded.append(self.served_model.encode_ids(ids))
        return encoded

    async def conversation(self, text: str) -> EncodedConversation:
        """Encodes a rendered conversation, with the tokens in which the model wrote its earlier answers.

        Only answers to the same tenant with the same salt and adapter are found. Raises ``InvalidRequest`` as
        ``texts``.
        """
        kept_answers = None if self.adds_special_tokens else self.served_model.kept_answers
        history = None
        if kept_answers is not None:
            namespace = CacheNamespace(self.tenant, self.cache_salt, self.served_model.first_adapter)
            history = kept_answers.look_up(text, namespace)
        if history is not None and history.has_kept_tokens:
            if (tokens := await self._history(history)) is not None:
                return EncodedConversation(tokens, kept_answers, history)
            history = None  # the tokenizer's own encoding may fit: it is often shorter than what the model wrote
        (tokens,) = await self.texts([text])
        return EncodedConversation(tokens, kept_answers, history)

    async def _history(self, history: History) -> bytes | None:
        """Returns the tokens of a conversation with kept ones in their places; None if there are too many."""
        texts = [piece for piece in history.pieces if isinstance(piece, str)]
        try:
            encoded = iter(await self.texts(texts) if texts else ())
        except ContextLengthExceeded:
            return None
        except InvalidRequest as error:
            error.index = None  # the pieces are one prompt
            raise
        tokens = b"".join([next(encoded) if isinstance(piece, str) else piece for piece in history.pieces])
        return tokens if len(tokens) // 4 <= self.served_model.max_prompt_and_answer else None

    async def texts(self, texts: Sequence[str]) -> list[bytes]:
        """Encodes texts to little-endian int32 ids. Raises ``InvalidRequest`` with ``field`` as ``param``."""
        served_model, limit = self.served_model, self.served_model.max_prompt_and_answer
        tokenizer = served_model.require_tokenizer(self.field)
        if (longest := served_model.max_token_characters) is not None:
            for index, text in enumerate(texts):
                if len(text) > limit * longest:
                    with numbering(index, len(texts)):
                        raise context_length_exceeded(
                            f"the prompt has {len(text)} characters", limit, param=self.field
                        )

        n_characters, adds = sum(map(len, texts)), self.adds_special_tokens
        try:
            if n_characters <= _MAX_INLINE_CHARACTERS and tokenizer.is_bounded:
                encoded: list[bytes] = []
                for index, text in enumerate(texts):
                    with numbering(index, len(texts)):
                        encoded.append(
                            tokenizer.encode_inline(text, limit, adds_special_tokens=adds, namespace=self.tenant)
                        )
                return encoded
            if n_characters <= _MAX_BATCHED_CHARACTERS:
                return await served_model.batch_tokenizer.encode(
                    texts, adds_special_tokens=adds, tenant=self.tenant
                )
            encoded = []
            encode_batch = partial(tokenizer.encode_batch, adds_special_tokens=adds, namespace=self.tenant)
            # One call for each group, so that a client's disconnect cancels the remaining ones.
            for group in batches(texts, _MAX_BATCHED_CHARACTERS):
                for result in await served_model.one_at_a_time.run(partial(encode_batch, group, limit)):
                    with numbering(len(encoded), len(texts)):
                        if isinstance(result, InvalidRequest):
                            raise result
                    encoded.append(result)
            return encoded
        except InvalidRequest as error:
            error.param = self.field
            raise
