"""What a request may carry from a branch: an observer, a constraint, a continuation, an eviction of its KV."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from radixkv.errors import RequestError
from radixkv.wire.messages import KVEvictionUse, Submit, TokenLogprobs

if TYPE_CHECKING:
    from radixkv.runtime.cache.block_table import BlockTable
    from radixkv.runtime.request import Request, Update


class Observer:
    """Follows the choices of a request that has chosen a branch. A request that has chosen none calls no branch.

    The moments, none of which may raise:

    * ``prompt_counted`` comes first, when a step's result is taken, mostly after the turn's launch.
    * ``released`` comes for a finished choice that had pages and whose prompt was computed, once no launched step
      uses them: mostly when a result is taken, also before a launch that preempts, and with an abort between turns.
    * ``ended`` comes when the last result of a request that has not failed is taken, or with its abort: before the
      terminal message and the next plan, before or after the releases.
    """

    __slots__ = ()

    def prompt_counted(self, request: Request) -> None:
        """Takes note that a choice's prompt is computed, and how much of it was cached."""

    def released(self, request: Request) -> None:
        """Takes note that a finished choice, whose prompt was computed, has released its pages."""

    def ended(self, choices: Sequence[Request], *, is_prompt_computed: bool) -> None:
        """Takes note that all choices have ended, unless the request has failed. Some may still hold pages."""


class RequestBranch(NamedTuple):
    """A branch that a request chooses by its message."""

    is_chosen: Callable[[Submit], bool]
    follow: Callable[[Submit, Sequence[Request]], Observer | None]
    """Begins to follow the choices of a new request; returns what the branch wants to be told of it.

    Raises ``RequestError`` if the request cannot have the branch."""


class Constraint(Protocol):
    """What the tokens of one choice must obey."""

    @property
    def has_ended(self) -> bool:
        """Whether the output is complete, so that no token may follow."""

    @property
    def end_tokens(self) -> Collection[int]:
        """The tokens that end the output, where they are allowed."""

    def accept(self, token: int) -> bool:
        """Appends a token to the output; False, without any change, if it is not allowed. O(1) mostly."""

    def forced(self, n_tokens: int) -> bytes:
        """Returns up to ``n_tokens`` tokens, little-endian int32, whose text must come next; none if nothing must
        or that is not known. Others may write the same text. Changes nothing."""

    def n_allowed(self, tokens: bytes) -> int:
        """Returns how many of these tokens may come next, one after another, without those that end the output.
        Changes nothing. O(tokens)."""

    def rejection(self, token: int) -> RequestError:
        """Returns the error that ends a choice when ``accept`` has refused its sampled token."""


class Continuation(Protocol):
    """Decides how the choices of a request go on, in place of one sampled token after another.

    A choice with a continuation is planned until its known tokens are computed. The continuation takes the logprobs
    of its last row, and then the choice pauses.
    """

    def take(self, request: Request, logprobs: TokenLogprobs | None) -> None:
        """Takes the likeliest next tokens of a choice, and pauses it. O(1)."""

    def advance(self) -> list[Update]:
        """Lets the choices go on if all pause, after the results of a step in which some of them had rows."""


class KVEviction(Protocol):
    """Drops pages of one choice while it runs, so that its later tokens do not attend to them."""

    @property
    def use(self) -> KVEvictionUse:
        """What it has dropped so far."""

    def pages_to_score(self, blocks: BlockTable, end: int) -> tuple[int, ...]:
        """Returns the pages of which it wants to know the scores after a row that ends before position ``end``.
        O(those pages)."""

    def take_scores(self, scores: Sequence[float]) -> None:
        """Takes the scores that a finished row has brought, in the order in which the pages were asked for."""

    def most_pages(self, n_prompt: int) -> int:
        """Returns how many pages its choice holds at most, with a prompt of ``n_prompt`` tokens."""

    def exact_end(self, n_prompt: int) -> int:
        """Returns the position before which its choice, with a prompt of ``n_prompt`` tokens, drops no pages.

        The KV of the tokens before it is what it is without an eviction.
        """

    def row_limit(self, request: Request) -> int:
        """Returns where the next row of its choice must end at the latest, because pages may go there."""

    def make_room(self, request: Request) -> bool:
        """Drops what its choice may not keep beside the page of its next token.

        Returns:
            False, without any change, if it must know the results of launched steps first.
        """
