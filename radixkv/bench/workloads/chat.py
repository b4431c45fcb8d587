"""Small talk, or recorded conversations whose answers the model gives itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from radixkv.bench.session import Message, Request, Session, Turns
from radixkv.bench.workloads.answers import kept_line, right_beginning
from radixkv.bench.workloads.datasets.conversations import Conversation, read_conversations
from radixkv.bench.workloads.parameters import Answered
from radixkv.bench.workloads.problems import chat as family
from radixkv.bench.workloads.questions import bad_lines, check_enough
from radixkv.bench.workloads.source import Made, Source

_SYSTEMS = ("system", "developer")
"""Roles of a system prompt; the second is OpenAI's newer name for it, which few chat templates know."""


class Chat(Answered, frozen=True, kw_only=True, tag="chat"):
    """Chats as messages, each turn behind the model's own answers to those before.

    Of recorded conversations, the system prompt and the user's messages are sent, and nothing else.
    """

    num_sessions: int = 32
    num_turns: int = 8
    """Of each chat; a recorded one may have fewer."""
    max_characters: int = 14_000
    """Of what is sent of a recorded chat, as JSON; turns beyond are left out, and counted as ``too_long``."""
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
        scripts, counts = self._recorded(read.items)
        what = f"conversations with a user who begins within max_characters {self.max_characters}"
        check_enough(source, what, len(scripts), self.num_sessions, settings="num_sessions")
        return Made([self._session(script) for script in scripts], {**bad_lines(read.n_bad_lines), **counts})

    def _recorded(self, conversations: Iterable[Conversation]) -> tuple[list[_Script], Counter[str]]:
        """The first that can be asked; conversations before the last of them count if they cannot."""
        counts = Counter[str]()
        scripts: list[_Script] = []
        for conversation in conversations:
            if len(scripts) == self.num_sessions:
                break
            whole = _script_of(conversation.messages, self.num_turns)
            script = whole.within(self.max_characters)
            counts["never_asked"] += not whole.users
            counts["too_long"] += len(whole.users) - len(script.users)
            if script.users:
                scripts.append(script)
        return scripts, +counts  # without zeros

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

    head: Sequence[Message]
    users: Sequence[Message]
    answers: Sequence[str | None]
    """The right one to each of the user's messages, of one line; None: any is."""

    def within(self, max_characters: int) -> _Script:
        """The turns for which the messages, without answers, have at most so many characters as JSON."""
        count = len(self.users)
        while count and len(msgspec.json.encode([*self.head, *self.users[:count]]).decode()) > max_characters:
            count -= 1
        return _Script(self.head, self.users[:count], self.answers[:count])


def _made(chat: family.Chat) -> _Script:
    return _Script(
        head=[{"role": "system", "content": chat.system}] if chat.system else [],
        users=[{"role": "user", "content": user} for user, _ in chat.turns],
        answers=[answer for _, answer in chat.turns],
    )


def _script_of(messages: Sequence[Message], n_turns: int) -> _Script:
    users = [message for message in messages if message["role"] == "user"][:n_turns]
    head = [{**message, "role": "system"} for message in messages[:1] if message["role"] in _SYSTEMS]
    return _Script(head, users, answers=[None] * len(users))
