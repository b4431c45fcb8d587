"""The typical request of a recording."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.errors import ConfigError
from radixkv.lab.planner.plan import RequestShape
from radixkv.lab.simulator.recording import Recording
from radixkv.lab.simulator.traffic import Traffic
from radixkv.tree.node import TOKEN_BYTES


def typical_request(recording: Recording, answer: int | None) -> RequestShape:
    """Returns the mean lengths of a recording, and the prefix that all of its prompts share. O(prompts' symbols).

    Args:
        recording: the requests.
        answer: tokens of an answer; None takes the mean of the recording.

    Raises:
        ConfigError: the recording has no lengths of answers and ``answer`` is None, or it has them and it is not.
    """
    recorded = recording.answer_tokens
    if recorded is not None and answer is not None:
        raise ConfigError(f"{recording.name} says how long its answers are; leave --answer {answer} out")
    if recorded is None and answer is None:
        raise ConfigError(f"{recording.name} does not say how long its answers are; give --answer")
    traffic = recording.traffic
    mean_answer = answer if recorded is None else _rounded_mean(recorded)
    assert mean_answer is not None
    return RequestShape(_rounded_mean(traffic.n_tokens), mean_answer, _common_prefix(traffic))


def _rounded_mean(lengths: Sequence[int]) -> int:
    return max(1, round(sum(lengths) / len(lengths)))


def _common_prefix(traffic: Traffic) -> int:
    """Returns the tokens of the whole pages that all prompts begin with."""
    common = traffic.symbols(0)
    for index in range(1, len(traffic.n_tokens)):
        symbols = traffic.symbols(index)
        if not symbols.startswith(common):
            pairs = enumerate(zip(common, symbols, strict=False))
            common = common[: next((place for place, (one, other) in pairs if one != other), len(symbols))]
    return len(common) // (traffic.symbols_per_page * TOKEN_BYTES) * traffic.page_size
