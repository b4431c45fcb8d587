"""Whether prompts repeat the answers that came before them."""

from __future__ import annotations

from radixkv.tree.node import State

_WEIGHT = 1 / 8
"""Weight of the newest prompt in the share: some dozen prompts change it."""
_MIN_SHARE = 1 / 8
"""A state at an answer's end costs copies, and a slot for a while: it must be used now and then."""


class RepeatedAnswers:
    """Learns which share of the next turns repeats the answer before them unchanged.

    A chat's template may leave reasoning out of earlier answers, or clients may change them. No frontend has to say
    so: the tree has the pages of an answer, and a prompt that goes on behind the message before it shows whether it
    has the same tokens. It may be shorter than the answer, where a template leaves long reasoning out.

    Args:
        block_tokens: positions of states are multiples of it.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._share = _MIN_SHARE
        self.are_seen = False
        """Whether a prompt has repeated an answer since the start."""

    @property
    def are_expected(self) -> bool:
        """Whether answers are repeated often enough, or nothing is known yet."""
        return self._share >= _MIN_SHARE

    @property
    def are_usual(self) -> bool:
        """Whether a next turn is more likely to repeat the answer than not."""
        return self._share > 0.5

    def note(self, source: State, end: int, n_in_tree: int) -> None:
        """Takes note of the first row of a prompt. O(1).

        Args:
            source: what the prompt goes on from.
            end: the position after the row's last one.
            n_in_tree: leading tokens whose pages the tree had before.
        """
        is_behind_answer = source.answer_end < end
        differs = n_in_tree <= end - self._block_tokens  # by more than a page that the row does not fill
        if source.answer_end and (is_behind_answer or differs):
            is_repeated = n_in_tree >= source.answer_end
            self._share += (is_repeated - self._share) * _WEIGHT
            self.are_seen |= is_repeated
