"""From OpenAI's completion request to prompts for the runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from radixkv.config import MAX_SEED
from radixkv.errors import ContextLengthExceeded, InvalidRequest
from radixkv.frontend.client import Prompt
from radixkv.frontend.failure import ModelNotFound
from radixkv.frontend.schema import CompletionRequest, check_prompt_count, mixed_prompt
from radixkv.sampling import SamplingParams
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import Ready, pack_tokens

MAX_SALT_BYTES = 128
ENCODE_INLINE_CHARACTERS = 4096
"""Longer prompts are encoded in a thread, so that the event loop goes on."""


@dataclass(frozen=True)
class Served:
    """The one model that is served."""

    name: str
    root: str
    """What the user asked for: a folder or a hub name."""
    ready: Ready
    tokenizer: Tokenizer | None
    """None: the checkpoint has none, and prompts are token ids."""
    eos_token_ids: frozenset[int]
    created: int
    """Seconds since 1970."""
    longest_token_characters: int | None = None
    """The tokenizer's; None refuses no text unread."""
    encoding: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a long text is encoded, which takes hundreds of bytes of memory for each token."""

    @property
    def max_prompt_and_answer(self) -> int:
        """Most tokens of a prompt and its answer together; the last token of an answer needs no page."""
        return min(self.ready.max_model_len, self.ready.n_pages * self.ready.page_size + 1)


async def to_prompts(request: CompletionRequest, served: Served) -> list[Prompt]:
    """The request's prompts, encoded and checked. Long ones are encoded in a thread.

    Raises:
        InvalidRequest: naming the field that cannot be served.
    """
    if request.model is not None and request.model != served.name:
        raise ModelNotFound(f"this server serves the model {served.name!r} only", param="model")
    salt = request.cache_salt or ""
    if len(salt.encode()) > MAX_SALT_BYTES:
        raise InvalidRequest(f"cache_salt is longer than {MAX_SALT_BYTES} bytes", param="cache_salt")
    sampling = _sampling(request, served)
    return [
        Prompt(
            tokens=tokens,
            sampling=_fitted(sampling, request.max_tokens, len(tokens) // 4, served),
            cache_salt=salt,
            reads_cache=not request.skip_reading_prefix_cache,
        )
        for tokens in await _encode(_separate(request.prompt), served)
    ]


def _sampling(request: CompletionRequest, served: Served) -> SamplingParams:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if stop and served.tokenizer is None:
        raise InvalidRequest("stop strings need a tokenizer, and this checkpoint has none", param="stop")
    stop_token_ids = request.stop_token_ids or []
    if stop_token_ids:
        _check_ids(stop_token_ids, served, "stop_token_ids")
    default = SamplingParams()
    return SamplingParams(
        max_tokens=default.max_tokens if request.max_tokens is None else request.max_tokens,
        temperature=default.temperature if request.temperature is None else request.temperature,
        top_p=default.top_p if request.top_p is None else request.top_p,
        top_k=default.top_k if request.top_k is None else request.top_k,
        # OpenAI's seeds may be negative. Those of the same lower 63 bits are one seed.
        seed=None if request.seed is None else request.seed & MAX_SEED,
        stop=tuple(stop),
        stop_token_ids=tuple(stop_token_ids),
        ignore_eos=bool(request.ignore_eos),
    )


def _fitted(sampling: SamplingParams, asked: int | None, n_prompt: int, served: Served) -> SamplingParams:
    """Sampling whose ``max_tokens`` fits; only a default is made smaller."""
    room = served.max_prompt_and_answer - n_prompt
    wanted = 1 if asked is None else asked
    if wanted > room:
        raise ContextLengthExceeded(
            f"the prompt has {n_prompt} tokens and {wanted} more are wanted, but the context holds "
            f"{served.ready.max_model_len} tokens and the pool {served.ready.n_pages * served.ready.page_size}; "
            "shorten one of them",
            param="max_tokens" if room >= 1 else "prompt",
        )
    if asked is not None or sampling.max_tokens is None:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))


def _separate(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """One item a prompt."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if not kinds:
        raise InvalidRequest("prompt is empty; give a string, strings, token ids or lists of them", param="prompt")
    if len(kinds) != 1:
        raise mixed_prompt()
    ids = [item for item in prompt if isinstance(item, int)]
    prompts: list[str | list[int]] = [ids] if ids else [item for item in prompt if not isinstance(item, int)]
    check_prompt_count(len(prompts))
    return prompts


async def _encode(prompts: Sequence[str | list[int]], served: Served) -> list[bytes]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not texts:
        encoded = [_pack(prompt, served) for prompt in prompts if not isinstance(prompt, str)]
    else:
        encoded = await _encode_texts(texts, served)
    if not all(encoded):
        raise InvalidRequest("a prompt is empty; it needs at least one token", param="prompt")
    return encoded


async def _encode_texts(texts: list[str], served: Served) -> list[bytes]:
    tokenizer, limit = served.tokenizer, served.max_prompt_and_answer
    if tokenizer is None:
        raise InvalidRequest("this checkpoint has no tokenizer; give prompts as token ids", param="prompt")
    if (longest := served.longest_token_characters) is not None:
        n_characters = max(map(len, texts))
        if n_characters > limit * longest:
            raise ContextLengthExceeded(
                f"the prompt has {n_characters} characters, but the context holds {limit} tokens; shorten it",
                param="prompt",
            )
    if sum(map(len, texts)) <= ENCODE_INLINE_CHARACTERS:
        return [tokenizer.encode(text, limit) for text in texts]
    async with served.encoding:
        # One thread call a text, so that a client's leaving ends the rest.
        return [await asyncio.to_thread(tokenizer.encode, text, limit) for text in texts]


def _pack(ids: list[int], served: Served) -> bytes:
    if not ids:
        return b""
    _check_ids(ids, served, "prompt")
    return pack_tokens(ids)


def _check_ids(ids: Sequence[int], served: Served, field: str) -> None:
    if min(ids) < 0 or max(ids) >= served.ready.vocab_size:
        raise InvalidRequest(
            f"{field} has a token id outside the vocabulary of {served.ready.vocab_size}", param=field
        )
