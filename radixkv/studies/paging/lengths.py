"""How long prompts and answers are: as published, where no data are given."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Pair(NamedTuple):
    """Tokens of a prompt, or of what a chat gains before an answer, and of the answer."""

    prompt: int
    answer: int


class Chat(NamedTuple):
    """The lengths of a chat, turn by turn."""

    system: str
    """Which system prompt it has: those of one text begin alike."""
    n_system: int
    """Tokens of the system prompt."""
    turns: tuple[Pair, ...]


@dataclass(frozen=True)
class Lengths(Generic[T]):
    """Where lengths come from."""

    source: str
    """As a report names it."""
    draw: Callable[[Random], T]
    """The next, at random."""
    tokenizer: str | None = None
    """The name of the one that counted tokens, without its folder; None if there were no texts to count."""


@dataclass(frozen=True)
class AllLengths:
    """What the workloads need."""

    problems: Lengths[Pair]
    """Short questions and their answers."""
    requests: Lengths[Pair]
    """What a server of many users is asked."""
    chats: Lengths[Chat]


Quantiles = tuple[tuple[float, int], ...]
"""Shares of a sample, ascending from 0 to 1, and the value that this share does not exceed."""

SHARES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

# The 10th and the 90th percentile of GSM8K's 1,319 test problems (openai/grade-school-math), in GPT-2's tokens.
QUESTION = (34, 86)
SOLUTION = (50, 154)

# Of the 200 airline runs of a tool-calling agent in sierra-research/tau-bench, in GPT-2's tokens: the agent's
# turns in a run, what users and tools say before each, and what the agent says or calls.
N_TURNS: Quantiles = tuple(zip(SHARES, (2, 5, 5, 7, 11, 16, 20, 23, 30, 30), strict=True))
SAID_BEFORE: Quantiles = tuple(zip(SHARES, (1, 3, 8, 17, 29, 259, 337, 376, 1050, 3122), strict=True))
SAID_BY_AGENT: Quantiles = tuple(zip(SHARES, (10, 27, 33, 54, 68, 100, 165, 221, 350, 519), strict=True))
N_SYSTEM = 256
"""Of a made chat; the airline agent's own has 1,304, with which few of its turns would fit 2,048 tokens."""

# ShareGPT's conversations in the evaluation of PagedAttention (Kwon et al., SOSP 2023), whose means are published;
# that the lengths are log-normal, and how wide, is an assumption.
SHAREGPT_MEANS = Pair(161, 338)
SHAREGPT_LOG_DEVIATION = 1.0


def published_lengths() -> AllLengths:
    """Lengths without files."""
    return AllLengths(
        problems=Lengths(
            "uniform between the 10th and the 90th percentile of GSM8K",
            lambda rng: Pair(rng.randint(*QUESTION), rng.randint(*SOLUTION)),
        ),
        requests=Lengths(
            "log-normal with the published means of ShareGPT",
            lambda rng: Pair(*(_log_normal(rng, mean) for mean in SHAREGPT_MEANS)),
        ),
        chats=Lengths("quantiles of tau-bench's airline runs behind a system prompt of 256 tokens", _made_chat),
    )


def at_quantile(quantiles: Quantiles, share: float) -> int:
    """The value at a share from 0 to 1, on a straight line between those that are known."""
    place = min(bisect_right(quantiles, share, key=lambda known: known[0]), len(quantiles) - 1)
    (below, least), (above, most) = quantiles[place - 1], quantiles[place]
    return round(least + (most - least) * (share - below) / (above - below))


def _made_chat(rng: Random) -> Chat:
    n_turns = at_quantile(N_TURNS, rng.random())
    turns = (
        Pair(at_quantile(SAID_BEFORE, rng.random()), at_quantile(SAID_BY_AGENT, rng.random()))
        for _ in range(n_turns)
    )
    return Chat("", N_SYSTEM, tuple(turns))


def _log_normal(rng: Random, mean: float) -> int:
    deviation = SHAREGPT_LOG_DEVIATION
    return max(1, round(rng.lognormvariate(math.log(mean) - deviation**2 / 2, deviation)))
