"""The positions of a prompt whose states the tree keeps. See docs/decisions/0066-states-of-delta-nets.md."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import numpy as np

from radixkv.runtime.request import Request


class Use(Enum):
    """Who is likely to go on from a state."""

    SHARED = "shared"
    """Several prompts."""
    TURN = "turn"
    """One prompt, the next turn of the chat."""
    REPEAT = "repeat"
    """The same prompt again: the state at its end is of no use to it, because its last token must be computed."""


class Places(Protocol):
    """Chooses the positions of a prompt whose states the tree keeps."""

    def choose(self, request: Request, start: int, end: int, n_in_tree: int) -> dict[int, Use]:
        """Returns positions of states to keep of a prompt, in its row or not.

        Args:
            request: the row's.
            start: first position of a row.
            end: the position after its last one.
            n_in_tree: leading tokens whose pages the tree had before.

        Returns:
            By position, a multiple of a block, who is likely to go on from it.
        """


class LikelyPlaces(Places):
    """The positions from which later prompts are likely to go on, at the multiples of a block at or below them:

    - where the prompt forks off from what is cached: the next prompt that does so finds a state there;
    - the end of the first message of a chat, which often has instructions and tools;
    - the end of the message before the last one, from which another last message goes on, of a prompt of which
      nothing is cached: in later turns of a chat it would take the room of another chat's state;
    - the end of the last message, where the next turn of the chat goes on, whatever the template does with answers;
      the end of the prompt without messages, or if it has two blocks or more behind the last one, as the results of
      tools have where the template keeps the turn open; if that is the prompt's last token, the block before as
      well, where the same prompt goes on;
    - the end of a prompt with several choices, where all but the first go on, unless forks need no state.

    Args:
        block_tokens: positions are multiples of it.
        end_token_ids: tokens that end a message or an answer.
        keeps_for_choices: whether the choices of a prompt go on from a state of the tree.
    """

    def __init__(self, block_tokens: int, end_token_ids: frozenset[int], *, keeps_for_choices: bool) -> None:
        self._block_tokens = block_tokens
        self._end_token_ids = sorted(end_token_ids)
        self._keeps_for_choices = keeps_for_choices
        self._found_until: dict[int, int] = {}
        """By batch slot, where its newest row ends, if the tree had all of its pages before."""
        self._ends: dict[int, tuple[tuple[str, int], tuple[int, int, int]]] = {}
        """By batch slot, the id and length of its newest prompt, and ``_message_ends`` of it."""

    def choose(self, request: Request, start: int, end: int, n_in_tree: int) -> dict[int, Use]:
        """See ``Places.choose``. O(1), and O(tokens) for the first row of a prompt."""
        first, before_last, last = self._message_ends(request, is_cold=start == 0)
        places = [first, before_last]
        if n_in_tree < end and (n_in_tree > start or self._found_until.get(request.batch_slot) == start):
            places.append(n_in_tree)
        self._found_until[request.batch_slot] = end if n_in_tree == end else 0
        has_choices = self._keeps_for_choices and bool(request.followers)
        uses = {self._floor(request.n_prompt - 1): Use.REPEAT} if self._floor(last) == request.n_prompt else {}
        turns = [last, request.n_prompt - 1] if has_choices else [last]
        uses |= dict.fromkeys(map(self._floor, turns), Use.TURN)
        return uses | dict.fromkeys(map(self._floor, places), Use.SHARED)

    def _floor(self, position: int) -> int:
        return position - position % self._block_tokens

    def _message_ends(self, request: Request, *, is_cold: bool) -> tuple[int, int, int]:
        """Returns where the first message of a prompt ends, the one before the last if ``is_cold`` is true in the
        prompt's first row, and the last; 0 for none."""
        prompt = request.id, request.n_prompt
        known, ends = self._ends.get(request.batch_slot, (None, (0, 0, 0)))
        if known != prompt:
            first, before_last, last = self._find_message_ends(request)
            ends = first, before_last if is_cold else 0, last
            self._ends[request.batch_slot] = prompt, ends
        return ends

    def _find_message_ends(self, request: Request) -> tuple[int, int, int]:
        ids = np.frombuffer(request.tokens(0, request.n_prompt), "<i4")
        is_end = np.zeros(len(ids), np.bool_)
        for end_token_id in self._end_token_ids:  # few; ``np.isin`` takes ten times as long for a short prompt
            is_end |= ids == end_token_id
        found = np.flatnonzero(is_end) + 1
        first = int(found[0]) if len(found) else 0
        ends = [0, *map(int, found[-2:])]
        if request.n_prompt - 1 - ends[-1] >= 2 * self._block_tokens or len(ends) == 1:
            ends.append(request.n_prompt)
        return first, ends[-2], ends[-1]
