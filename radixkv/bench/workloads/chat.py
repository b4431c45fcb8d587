"""Workload of chats: generated small talk, or recorded conversations with the model's own answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from radixkv.bench.session import BenchRequest, Message, Session, Turns
from radixkv.bench.workloads.answers import answer_line, prefix_check
from radixkv.bench.workloads.datasets.conversations import Conversation, read_conversations
from radixkv.bench.workloads.parameters import FixedOutputParameters
from radixkv.bench.workloads.problems import chat as small_talk
from radixkv.bench.workloads.questions import bad_lines, check_enough
from radixkv.bench.workloads.source import Source, WorkloadSessions

_SYSTEMS = ("system", "developer")
"""Roles of a system prompt; ``developer`` is OpenAI's newer name, which few chat templates know."""


class Chat(FixedOutputParameters, frozen=True, kw_only=True, tag="chat"):
    """Chats as messages; each prompt has the model's own answers to the earlier turns.

    Recorded conversations contribute their system prompt and their user messages only.
    """

    num_sessions: int = 32
    num_turns: int = 8
    """User messages of each chat; a recorded chat may have fewer."""
    max_characters: int = 14_000
    """Maximum length of a recorded chat's messages as JSON; turns beyond are left out as ``too_long``."""
    output_len: int = 24

    def make(self, source: Source) -> WorkloadSessions:
        """Returns one session for each chat. O(size).

        Raises:
            ConfigError: the data set of conversations cannot be read or is too short.
        """
        if source.dataset is None:
            chats = islice(small_talk.generate_chats(source.seed, self.num_turns), self.num_sessions)
            return WorkloadSessions([self._session(_script_of_generated(chat)) for chat in chats])
        read = read_conversations(source.dataset, skip_bad_lines=source.skip_bad_lines)
        scripts, counts = self._recorded(read.items)
        usable = f"conversations whose first user message is within max_characters {self.max_characters}"
        check_enough(source, usable, len(scripts), self.num_sessions, settings="num_sessions")
        return WorkloadSessions(
            [self._session(script) for script in scripts], {**bad_lines(read.n_bad_lines), **counts}
        )

    def _recorded(self, conversations: Iterable[Conversation]) -> tuple[list[_Script], Counter[str]]:
        """Returns the first ``num_sessions`` usable conversations and what was left out before the last of them."""
        counts = Counter[str]()
        scripts: list[_Script] = []
        for conversation in conversations:
            if len(scripts) == self.num_sessions:
                break
            full = _script_of_recorded(conversation.messages, self.num_turns)
            script = full.within(self.max_characters)
            counts["never_asked"] += not full.users
            counts["too_long"] += len(full.users) - len(script.users)
            if script.users:
                scripts.append(script)
        return scripts, +counts  # without zeros

    def _session(self, script: _Script) -> Session:
        def turns() -> Turns:
            messages = list(script.head)
            for user, answer in zip(script.users, script.answers, strict=True):
                messages.append(user)
                check = None if answer is None else prefix_check(answer)
                (reply,) = yield (BenchRequest(list(messages), self.output_len, check=check),)
                content = reply.texts[0] if answer is None else answer_line(reply.texts[0], answer)
                messages.append({"role": "assistant", "content": content})

        return Session(turns, n_requests=len(script.users))


@dataclass(frozen=True)
class _Script:
    """The messages that a chat sends."""

    head: Sequence[Message]
    """The system prompt, if there is one."""
    users: Sequence[Message]
    """The user's messages."""
    answers: Sequence[str | None]
    """The expected one-line answer to each of the user's messages. None: answers are not checked."""

    def within(self, max_characters: int) -> _Script:
        """Returns the leading turns whose messages, without answers, have at most this length as JSON."""
        count = len(self.users)
        while count and len(msgspec.json.encode([*self.head, *self.users[:count]]).decode()) > max_characters:
            count -= 1
        return _Script(self.head, self.users[:count], self.answers[:count])


def _script_of_generated(chat: small_talk.Chat) -> _Script:
    return _Script(
        head=[{"role": "system", "content": chat.system}] if chat.system else [],
        users=[{"role": "user", "content": user} for user, _ in chat.turns],
        answers=[answer for _, answer in chat.turns],
    )


def _script_of_recorded(messages: Sequence[Message], n_turns: int) -> _Script:
    users = [message for message in messages if message["role"] == "user"][:n_turns]
    head = [{**message, "role": "system"} for message in messages[:1] if message["role"] in _SYSTEMS]
    return _Script(head, users, answers=[None] * len(users))
