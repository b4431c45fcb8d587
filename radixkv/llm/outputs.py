"""What ``LLM`` gives back; names and fields are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Logprob:
    """How likely a token was, by the logits before bias, penalties and temperature."""

    logprob: float
    rank: int
    """1: no token was likelier."""
    decoded_token: str | None
    """Its text by itself; None without a tokenizer."""


@dataclass(frozen=True)
class CompletionOutput:
    """One answer."""

    index: int
    """Which of the prompt's ``n`` answers."""
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """``stop`` or ``length``; None while more may come."""
    stop_reason: int | str | None = None
    """The stop string, or the token of ``stop_token_ids``, that ended it."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token: itself first, then as many of the likeliest as were asked for; None if nothing was."""
    cumulative_logprob: float | None = None
    """The sum over the answer's own tokens; None without ``logprobs``."""


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and its answers."""

    request_id: str
    prompt: str | None
    """None if the prompt was given as token ids."""
    prompt_token_ids: list[int]
    num_cached_tokens: int
    """Prompt tokens that were not computed; known once all answers have ended."""
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each token of the prompt, as in an answer; None for the first, which nothing comes before."""
    finished: bool = True
    """Whether all answers have ended."""
