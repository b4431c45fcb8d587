"""Published distributions of prompt and answer lengths."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class LengthPair(NamedTuple):
    """Tokens of a prompt and its answer; in a chat, the prompt counts only tokens added since the last answer."""

    prompt: int
    answer: int


class ChatLengths(NamedTuple):
    """The lengths of a chat and its turns."""

    system: str
    """Text of the system prompt; chats with the same text share its tokens."""
    n_system: int
    """Tokens of the system prompt."""
    turns: tuple[LengthPair, ...]


@dataclass(frozen=True)
class LengthDistribution(Generic[T]):
    """A distribution of lengths and its origin."""

    source: str
    """Description of the origin for reports."""
    draw: Callable[[Random], T]
    """Draws the next sample."""
    tokenizer: str | None = None
    """Name of the tokenizer that counted tokens, without its folder; None if no texts were counted."""


@dataclass(frozen=True)
class WorkloadLengths:
    """The length distributions that the workloads use."""

    problems: LengthDistribution[LengthPair]
    """Short questions and their answers."""
    requests: LengthDistribution[LengthPair]
    """Requests of a server with many users."""
    chats: LengthDistribution[ChatLengths]
    """Chats of several turns."""


Quantiles = tuple[tuple[float, int], ...]
"""Pairs of a level, ascending from 0 to 1, and the value at that level."""

QUANTILE_LEVELS = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

# 10th and 90th percentile of GSM8K's 1,319 test problems (openai/grade-school-math), in GPT-2 tokens.
QUESTION_TOKENS = (34, 86)
SOLUTION_TOKENS = (50, 154)

# From the 200 airline runs of a tool-calling agent in sierra-research/tau-bench, in GPT-2 tokens: turns per run,
# tokens of users and tools before each answer, and tokens of the agent's answer or tool call.
N_TURNS: Quantiles = tuple(zip(QUANTILE_LEVELS, (2, 5, 5, 7, 11, 16, 20, 23, 30, 30), strict=True))
TURN_PROMPT_TOKENS: Quantiles = tuple(
    zip(QUANTILE_LEVELS, (1, 3, 8, 17, 29, 259, 337, 376, 1050, 3122), strict=True)
)
TURN_ANSWER_TOKENS: Quantiles = tuple(
    zip(QUANTILE_LEVELS, (10, 27, 33, 54, 68, 100, 165, 221, 350, 519), strict=True)
)
N_SYSTEM_TOKENS = 256
"""System prompt of a synthetic chat. The airline agent's has 1,304 tokens, so few turns would fit 2,048 tokens."""

# Published means of ShareGPT's conversations in the evaluation of PagedAttention (Kwon et al., SOSP 2023). The
# log-normal shape and its width are assumptions.
SHAREGPT_MEANS = LengthPair(161, 338)
SHAREGPT_LOG_DEVIATION = 1.0


def published_lengths() -> WorkloadLengths:
    """Returns the published distributions, which need no files."""
    return WorkloadLengths(
        problems=LengthDistribution(
            "uniform between the 10th and the 90th percentile of GSM8K",
            lambda rng: LengthPair(rng.randint(*QUESTION_TOKENS), rng.randint(*SOLUTION_TOKENS)),
        ),
        requests=LengthDistribution(
            "log-normal with the published means of ShareGPT",
            lambda rng: LengthPair(*(_log_normal(rng, mean) for mean in SHAREGPT_MEANS)),
        ),
        chats=LengthDistribution(
            "quantiles of tau-bench's airline runs behind a system prompt of 256 tokens", _draw_chat
        ),
    )


def at_quantile(quantiles: Quantiles, level: float) -> int:
    """Returns the value at a level from 0 to 1, interpolated linearly between known quantiles."""
    index = min(bisect_right(quantiles, level, key=lambda quantile: quantile[0]), len(quantiles) - 1)
    (lower_level, low), (upper_level, high) = quantiles[index - 1], quantiles[index]
    return round(low + (high - low) * (level - lower_level) / (upper_level - lower_level))


def _draw_chat(rng: Random) -> ChatLengths:
    n_turns = at_quantile(N_TURNS, rng.random())
    turns = (
        LengthPair(at_quantile(TURN_PROMPT_TOKENS, rng.random()), at_quantile(TURN_ANSWER_TOKENS, rng.random()))
        for _ in range(n_turns)
    )
    return ChatLengths("", N_SYSTEM_TOKENS, tuple(turns))


def _log_normal(rng: Random, mean: float) -> int:
    deviation = SHAREGPT_LOG_DEVIATION
    return max(1, round(rng.lognormvariate(math.log(mean) - deviation**2 / 2, deviation)))
