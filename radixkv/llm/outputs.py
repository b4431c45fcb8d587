"""The results of ``LLM``, with vLLM's class and field names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a token, from the logits before bias, penalties and temperature."""

    logprob: float
    rank: int
    """Rank of the token by probability; 1 is the most likely."""
    decoded_token: str | None
    """The text of the token alone; None without a tokenizer."""


@dataclass(frozen=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    """Index of the answer among the prompt's ``n``."""
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """``stop`` or ``length``; None while the answer is unfinished."""
    stop_reason: int | str | None = None
    """The stop string, or the token of ``stop_token_ids``, that ended the answer."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token, logprobs by token id: its own first, then those of the requested number of most likely
    tokens. None if the request did not ask for logprobs."""
    cumulative_logprob: float | None = None
    """Sum of the logprobs of the answer's tokens; None without ``logprobs``."""


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and its answers."""

    request_id: str
    prompt: str | None
    """The prompt's text; None if the prompt was given as token ids."""
    prompt_token_ids: list[int]
    num_cached_tokens: int
    """Prompt tokens taken from the prefix cache; known once all answers have ended."""
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each prompt token, logprobs by token id as in ``CompletionOutput``; None for the first token. The list is
    None if the request did not ask for prompt logprobs."""
    finished: bool = True
    """Whether all answers have ended."""
    num_loaded_tokens: int = 0
    """The part of ``num_cached_tokens`` that was loaded from the host tier."""
    num_fetched_tokens: int = 0
    """The part of ``num_loaded_tokens`` that came from disk before."""
