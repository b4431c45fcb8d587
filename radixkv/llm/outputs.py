"""The results of ``LLM``, with vLLM's class and field names."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import KVEvictionUse


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
    """Sum of the logprobs of the answer's tokens; None without ``logprobs`` or beam search."""


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
    kv_eviction: KVEvictionUse | None = None
    """What the answer went on without, of a request with a ``kv_budget``; None: the answer is exact."""


@dataclass(frozen=True)
class EmbeddingOutput:
    """The embedding of one prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its number of values."""
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """One prompt and its embedding."""

    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int
    """Prompt tokens taken from the prefix cache."""
    outputs: EmbeddingOutput
    finished: bool = True


@dataclass(frozen=True)
class ScoringOutput:
    """The score of one query and document."""

    score: float
    """From 0 to 1, the higher the better they match."""


@dataclass(frozen=True)
class ScoringRequestOutput:
    """One query with a document, and their score."""

    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int
    """Prompt tokens taken from the prefix cache."""
    outputs: ScoringOutput
    finished: bool = True


@dataclass(frozen=True)
class BeamSearchSequence:
    """One answer of a beam search."""

    tokens: list[int]
    """The prompt's tokens and the answer's."""
    cum_logprob: float
    """Sum of the logprobs of the answer's tokens."""
    text: str | None
    """All ``tokens`` decoded, with special tokens; None without a tokenizer."""
    finish_reason: str | None
    """``stop`` or ``length``."""
    stop_reason: int | str | None = None
    """Always None: an answer ends with an end-of-sequence token, or at its maximum length."""


@dataclass(frozen=True)
class BeamSearchOutput:
    """The answers that a beam search has found for one prompt, the best first."""

    sequences: list[BeamSearchSequence]


def beam_search_output(output: RequestOutput, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """Returns the output of a request with beam search in vLLM's shape. O(tokens)."""
    sequences = []
    for answer in output.outputs:
        tokens = [*output.prompt_token_ids, *answer.token_ids]
        text = None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=False)
        logprob = 0.0 if answer.cumulative_logprob is None else answer.cumulative_logprob
        sequences.append(BeamSearchSequence(tokens, logprob, text, answer.finish_reason))
    return BeamSearchOutput(sequences)
