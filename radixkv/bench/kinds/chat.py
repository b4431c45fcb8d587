"""Small talk, or recorded conversations whose answers the model gives itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from radixkv.bench.datasets.conversations import read_conversations
from radixkv.bench.families import chat as family
from radixkv.bench.kinds.answers import kept_line, right_beginning
from radixkv.bench.kinds.parameters import Answered
from radixkv.bench.kinds.questions import bad_lines, check_enough
from radixkv.bench.kinds.source import Made, Source
from radixkv.bench.session import Request, Session, Turns


class Chat(Answered, frozen=True, kw_only=True, tag="chat"):
    """Chats as messages, each turn behind the model's own answers to those before.

    Of recorded conversations, the system prompt and the user's messages are sent, and nothing else.
    """

    num_sessions: int = 32
    num_turns: int = 8
    """Of each chat; a recorded one may have fewer."""
    output_len: int = 24

    def make(self, source: Source) -> Made:
        """A session a chat. O(size).

        Raises:
            ConfigError: the data set, of conversations, cannot be read, or is too short.
        """
        if source.dataset is None:
            chats = islice(family.made_chats(source.seed, self.num_turns), self.num_sessions)
            return Made([self._session(_made(chat)) for chat in chats])
        read = read_conversations(source.dataset, skip_bad_lines=source.skip_bad_lines)
        scripts = [_recorded(conversation.messages, self.num_turns) for conversation in read.items]
        usable = [script for script in scripts if script.users]
        check_enough(source, "conversations with a user", len(usable), self.num_sessions)
        return Made([self._session(script) for script in usable[: self.num_sessions]], bad_lines(read.n_bad_lines))

    def _session(self, script: _Script) -> Session:
        def turns() -> Turns:
            messages = list(script.head)
            for user, answer in zip(script.users, script.answers, strict=True):
                messages.append(user)
                check = None if answer is None else right_beginning(answer)
                (reply,) = yield (Request(list(messages), self.output_len, is_right=check),)
                kept = reply.texts[0] if answer is None else kept_line(reply.texts[0], answer)
                messages.append({"role": "assistant", "content": kept})

        return Session(turns, n_requests=len(script.users))


@dataclass(frozen=True)
class _Script:
    """What is sent in a chat."""

    head: Sequence[Mapping[str, Any]]
    users: Sequence[Mapping[str, Any]]
    answers: Sequence[str | None]
    """The right one to each of the user's messages, of one line; None: any is."""


def _made(chat: family.Chat) -> _Script:
    return _Script(
        head=[{"role": "system", "content": chat.system}] if chat.system else [],
        users=[{"role": "user", "content": user} for user, _ in chat.turns],
        answers=[answer for _, answer in chat.turns],
    )


def _recorded(messages: Sequence[Mapping[str, Any]], n_turns: int) -> _Script:
    users = [message for message in messages if message["role"] == "user"][:n_turns]
    head = [message for message in messages[:1] if message["role"] == "system"]
    return _Script(head, users, answers=[None] * len(users))
