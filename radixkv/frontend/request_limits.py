"""What a request may ask for: its model, its salt, its lengths, its log-probabilities and its seed."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from radixkv.config import MAX_SEED
from radixkv.errors import ContextLengthExceeded, InvalidRequest
from radixkv.frontend.http.errors import ModelNotFound
from radixkv.frontend.served_model import Served
from radixkv.sampling import NO_SEED, SamplingParams

MAX_SALT_BYTES = 128
MAX_PROMPT_FIGURES = 1 << 21
"""Log-probabilities of prompt tokens in one reply, which has some 60 bytes for each."""

_LIMIT = "max_new_tokens"
"""Of a checkpoint's recommendations, the one that limits every answer."""


def check_model(name: str | None, served: Served) -> None:
    """Raises ``ModelNotFound`` for another model than the one that is served."""
    if name is not None and name != served.name:
        raise ModelNotFound(f"this server serves the model {served.name!r} only", param="model")


def check_salt(salt: str | None) -> None:
    """Raises ``InvalidRequest`` for a ``cache_salt`` that the runtime would not take."""
    if len((salt or "").encode()) > MAX_SALT_BYTES:
        raise InvalidRequest(f"cache_salt is longer than {MAX_SALT_BYTES} bytes", param="cache_salt")


def one_step(min_tokens: int | None) -> int:
    """``max_tokens`` of a prompt without an answer: it still takes a step, which computes and scores the prompt.

    Raises:
        InvalidRequest: for ``min_tokens`` of that answer.
    """
    if min_tokens is not None and min_tokens > 0:
        raise InvalidRequest(f"min_tokens is {min_tokens}; it must be at most max_tokens, 0", param="min_tokens")
    return 1


def check_figures(scored: Iterable[tuple[SamplingParams, int]], field: str) -> None:
    """Raises ``InvalidRequest`` if prompts have more log-probabilities than a reply may.

    Args:
        scored: of each prompt what is asked for, and its tokens.
        field: the one that asks.
    """
    wanted = [(n_tokens, one.prompt_logprobs) for one, n_tokens in scored if one.prompt_logprobs is not None]
    n_figures = sum(n_tokens * (n_likeliest + 1) for n_tokens, n_likeliest in wanted)
    if n_figures > MAX_PROMPT_FIGURES:
        raise InvalidRequest(
            f"{field} of {sum(n_tokens for n_tokens, _ in wanted)} prompt tokens would be {n_figures} numbers; at "
            f"most {MAX_PROMPT_FIGURES} a request, so ask for fewer or send fewer prompts",
            param=field,
        )


def folded_seed(seed: int | None) -> int | None:
    """A request's seed as one of ``SamplingParams``.

    OpenAI's may be negative: those of the same lower 63 bits are one seed, but for -1, which is none as in vLLM.
    """
    return None if seed is None or seed == NO_SEED else seed & MAX_SEED


def recommended(served: Served) -> dict[str, float | int]:
    """What the checkpoint recommends for fields of ``SamplingParams`` that a request leaves out."""
    return {name: value for name, value in served.default_sampling.items() if name != _LIMIT}


def fitted(
    sampling: SamplingParams, served: Served, n_prompt: int, asked: str | None, prompt_field: str
) -> SamplingParams:
    """Sampling whose ``max_tokens`` fits; only a default is made smaller, or what the checkpoint limits.

    Args:
        sampling: what the request asks for.
        served: says how much fits.
        n_prompt: tokens.
        asked: the field that says ``max_tokens``; None if that is a default.
        prompt_field: the field that holds the prompt.
    """
    room = served.max_prompt_and_answer - n_prompt
    wanted = sampling.max_tokens if asked is not None and sampling.max_tokens is not None else 1
    if wanted > room:
        raise ContextLengthExceeded(
            f"the prompt has {n_prompt} tokens and {wanted} more are wanted, but this model's maximum context "
            f"length is {served.max_prompt_and_answer} tokens; shorten one of them",
            param=asked if asked is not None and room >= 1 else prompt_field,
        )
    limits = (room, sampling.max_tokens, served.default_sampling.get(_LIMIT))
    return msgspec.structs.replace(sampling, max_tokens=min(int(limit) for limit in limits if limit is not None))
