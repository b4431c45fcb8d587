"""From which earlier request of a recording each request goes on, as the next turn of its conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from radixkv.lab.bench.workloads.mooncake import BLOCK_LEN
from radixkv.lab.simulator.traffic import BlockTraffic, Traffic


class Turn(NamedTuple):
    """The turn before a request."""

    before: int
    """Index of the earlier request."""
    n_shared: int
    """Leading tokens of the request that are known to be those of the earlier one's prompt."""


def find_turns(traffic: Traffic, lengths: Sequence[int]) -> list[Turn | None]:
    """Returns the turn before each request; None where a conversation begins.

    Where tokens are known, a request goes on from the longest of the shorter earlier prompts that it begins with.
    Of equal ones among these it goes on from the last; it never does from a prompt equal to its own.

    A trace tells only which whole blocks are equal: a request goes on from the last one whose whole blocks are the
    longest such prefix of its own, if its prompt is long enough to have that prompt and its answer, and if the last
    of these blocks belongs to that conversation alone when it comes.

    O(tokens · log requests), or O(blocks).

    Args:
        traffic: the prompts, in order of arrival.
        lengths: tokens of each prompt's answer.
    """
    return _turns_of_blocks(traffic, lengths) if isinstance(traffic, BlockTraffic) else _turns_of_tokens(traffic)


def _turns_of_tokens(traffic: Traffic) -> list[Turn | None]:
    n_tokens = traffic.n_tokens
    turns: list[Turn | None] = [None] * len(n_tokens)
    prompts = [traffic.symbols(index) for index in range(len(n_tokens))]
    prefixes: list[list[int]] = []
    """The prompts with which the current one begins, from the shortest to the longest; equal ones together."""
    for index in sorted(range(len(prompts)), key=lambda index: (prompts[index], index)):
        prompt = prompts[index]
        while prefixes and not prompt.startswith(prompts[prefixes[-1][0]]):
            prefixes.pop()
        if prefixes and prompts[prefixes[-1][0]] == prompt:
            prefixes[-1].append(index)
        else:
            prefixes.append([index])
        for equal in reversed(prefixes[:-1]):
            before = max((one for one in equal if one < index), default=None)
            if before is not None:
                turns[index] = Turn(before, n_tokens[before])
                break
    return turns


def _turns_of_blocks(traffic: BlockTraffic, lengths: Sequence[int]) -> list[Turn | None]:
    n_tokens = traffic.n_tokens
    turns: list[Turn | None] = []
    last: dict[int, int] = {}
    """By the last whole block of a request that was new with its conversation: the last request that ends there."""
    seen: set[int] = set()
    for index, n_prompt in enumerate(n_tokens):
        blocks = traffic.whole_blocks(index)
        place = next((place for place in reversed(range(len(blocks))) if blocks[place] in last), None)
        before = None if place is None else last[blocks[place]]
        is_turn = before is not None and n_prompt >= n_tokens[before] + lengths[before]
        turns.append(
            Turn(before, (place + 1) * BLOCK_LEN) if is_turn and before is not None and place is not None else None
        )
        if blocks and (blocks[-1] not in seen or (is_turn and last.get(blocks[-1]) == before)):
            last[blocks[-1]] = index
        seen.update(blocks)
    return turns
