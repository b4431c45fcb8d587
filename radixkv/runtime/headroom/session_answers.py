"""``SessionAnswer``: tells to which session an answer belongs, whose lengths are learnt apart."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.runtime.protocols.request import Observer
from radixkv.runtime.request import Request
from radixkv.tree.node import Namespace
from radixkv.wire.messages import Submit


class SessionAnswer(Observer):
    """A request of a session.

    Args:
        key: namespace and id of the session.
    """

    __slots__ = ("key",)

    def __init__(self, key: tuple[Namespace, str]) -> None:
        self.key = key

    @classmethod
    def follow(cls, message: Submit, choices: Sequence[Request]) -> SessionAnswer:
        """Follows a request with a ``session_id``. O(1)."""
        return cls((choices[0].namespace, message.session_id))
