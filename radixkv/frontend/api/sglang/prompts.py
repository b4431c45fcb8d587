"""From a ``/generate`` request to prompts for the runtime."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from radixkv.errors import InvalidRequest
from radixkv.frontend.api.sglang.schema import (
    DEFAULT_MAX_NEW_TOKENS,
    GenerateRequest,
    SamplingFields,
    for_each,
    parse_sampling,
)
from radixkv.frontend.in_flight import Prompt
from radixkv.frontend.prompt_encoding import check_ids, encode, separate
from radixkv.frontend.request_limits import check_figures, check_salt, fitted, folded_seed, one_step, recommended
from radixkv.frontend.served_model import Served
from radixkv.sampling import SamplingParams

_SPELLINGS: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "include_stop_str_in_output": "no_stop_trim",
}
"""``SamplingParams``' names, and SGLang's."""
_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
)
"""Fields of one name in both."""


@dataclass(frozen=True)
class Asked:
    """One prompt, and how its answers are shown."""

    prompt: Prompt
    rid: str
    """What the client calls it; empty for nothing."""
    scored_from: int | None
    """The first token of the prompt whose log-probability is wanted; None for no token of it."""
    has_texts: bool
    """Whether log-probabilities come with texts."""
    wants_answer: bool
    """False: the prompt is computed, to be cached or scored."""


async def asked_prompts(request: GenerateRequest, served: Served) -> list[Asked]:
    """The request's prompts, encoded and checked. Long ones are encoded in a thread.

    Raises:
        InvalidRequest: naming the field that cannot be served, as SGLang spells it.
    """
    given = request.text if request.text is not None else request.input_ids
    assert given is not None
    with _spelled({"prompt": request.prompt_field}):
        prompts = separate(given if isinstance(given, str) else list(given))
    check_salt(request.cache_salt)
    n_prompts = len(prompts)
    scoring = _scoring(request, n_prompts)
    settings = parse_sampling(bytes(request.sampling_params), n_prompts)
    sampled = [_sampling(fields, *wanted, served) for fields, wanted in zip(settings, scoring, strict=True)]
    with _spelled({"prompt": request.prompt_field}):
        encoded = await encode(prompts, served)
    n_tokens = [len(tokens) // 4 for tokens in encoded]
    check_figures(zip(sampled, n_tokens, strict=True), "top_logprobs_num")
    return [
        _asked(request, served, tokens, fields, sampling, rid, start)
        for tokens, fields, sampling, rid, (_, start) in zip(
            encoded, settings, sampled, _rids(request, n_prompts), scoring, strict=True
        )
    ]


def _asked(
    request: GenerateRequest,
    served: Served,
    tokens: bytes,
    fields: SamplingFields,
    sampling: SamplingParams,
    rid: str,
    start: int,
) -> Asked:
    n_prompt = len(tokens) // 4
    if start >= n_prompt:
        raise InvalidRequest(
            f"logprob_start_len is {start}; the prompt has {n_prompt} tokens", param="logprob_start_len"
        )
    asked = "max_new_tokens" if isinstance(fields.max_new_tokens, int) else None
    prompt = Prompt(
        tokens=tokens,
        sampling=fitted(sampling, served, n_prompt, asked, request.prompt_field),
        cache_salt=request.cache_salt or "",
        reads_cache=not request.skip_reading_prefix_cache,
        priority=request.priority or 0,
    )
    has_scores = sampling.logprobs is not None and start >= 0
    return Asked(
        prompt,
        rid,
        start if has_scores else None,
        bool(request.return_text_in_logprobs),
        fields.max_new_tokens != 0,
    )


def _scoring(request: GenerateRequest, n_prompts: int) -> list[tuple[int | None, int]]:
    """Of each prompt: how many of the likeliest tokens to report, None for no log-probabilities; and from where."""
    wanted = for_each(request.return_logprob, False, n_prompts, "return_logprob")
    counts = for_each(request.top_logprobs_num, 0, n_prompts, "top_logprobs_num")
    starts = for_each(request.logprob_start_len, -1, n_prompts, "logprob_start_len")
    for start in starts:
        if start < -1:
            raise InvalidRequest(
                f"logprob_start_len is {start}; it must be -1, for the answer only, or a place in the prompt",
                param="logprob_start_len",
            )
    return [
        (count, start) if is_wanted else (None, -1)
        for is_wanted, count, start in zip(wanted, counts, starts, strict=True)
    ]


def _sampling(fields: SamplingFields, n_logprobs: int | None, start: int, served: Served) -> SamplingParams:
    """What the request asks for; where it does not say, what the checkpoint recommends."""
    if fields.stop and served.tokenizer is None:
        raise InvalidRequest(
            "stop strings need a tokenizer, and this checkpoint has none; start the server with --tokenizer",
            param="stop",
        )
    if fields.stop_token_ids:
        check_ids(fields.stop_token_ids, served, "stop_token_ids")
    if fields.logit_bias:
        check_ids(list(fields.logit_bias), served, "logit_bias")
    values = msgspec.structs.asdict(fields)
    given: dict[str, Any] = {name: values[name] for name in _SAME if values[name] is not None}
    seed = fields.seed if fields.sampling_seed is None else fields.sampling_seed
    with _spelled(_SPELLINGS):
        most = one_step(fields.min_new_tokens) if fields.max_new_tokens == 0 else fields.max_new_tokens
        return SamplingParams(
            **(recommended(served) | given),
            max_tokens=DEFAULT_MAX_NEW_TOKENS if most is msgspec.UNSET else most,
            min_tokens=fields.min_new_tokens or 0,
            include_stop_str_in_output=bool(fields.no_stop_trim),
            seed=folded_seed(seed),
            logprobs=n_logprobs,
            prompt_logprobs=n_logprobs if start >= 0 else None,
        )


def _rids(request: GenerateRequest, n_prompts: int) -> list[str]:
    if isinstance(request.rid, str) and n_prompts > 1:
        return [f"{request.rid}_{place}" for place in range(n_prompts)]
    return for_each(request.rid, "", n_prompts, "rid")


@contextmanager
def _spelled(names: Mapping[str, str]) -> Iterator[None]:
    """Names fields in errors as the request does."""
    try:
        yield
    except InvalidRequest as error:
        # An error that is about a field begins with its name; "prompt" is also a word.
        text = re.sub(r"\b\w+\b", lambda found: _SPELLINGS.get(found[0], found[0]), str(error))
        raise type(error)(text, param=names.get(error.param or "", error.param)) from None
