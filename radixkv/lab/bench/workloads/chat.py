"""Workload of chats: generated small talk, or recorded conversations with the model's own answers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from radixkv.lab.bench.session import BenchRequest, Message, Session, Turns
from radixkv.lab.bench.workloads.base import ChatParameters, Source, WorkloadSessions, bad_lines, check_enough
from radixkv.lab.bench.workloads.conversations import Conversation, read_conversations, replay_dataset
from radixkv.lab.bench.workloads.problems import answer_line, prefix_check
from radixkv.lab.bench.workloads.templates import WORDS, Gaps, draw_values, read_templates

_SYSTEM_ROLES = ("system", "developer")
"""Roles of a system prompt; ``developer`` is OpenAI's newer name, which few chat templates know."""


class Chat(ChatParameters, frozen=True, kw_only=True, tag="chat"):
    """Chats as messages; each prompt has the answers to the earlier turns.

    With the model's answers, recorded conversations contribute their system prompt and their user messages only.
    With recorded answers they are replayed; those of generated chats are the expected ones.
    """

    num_sessions: int = 32
    num_turns: int = 8
    """User messages of each chat; a recorded chat may have fewer."""
    max_characters: int = 14_000
    """Maximum length of a recorded chat's messages as JSON; turns beyond are left out as ``too_long``.

    Answers count only if they are recorded ones.
    """
    output_len: int = 24

    def make(self, source: Source) -> WorkloadSessions:
        """Returns one session for each chat. O(size).

        Raises:
            ConfigError: the data set of conversations cannot be read or is too short.
        """
        if source.dataset is None:
            chats = islice(generate_chats(source.seed, self.num_turns), self.num_sessions)
            return WorkloadSessions([self._session(_script_of_generated(chat)) for chat in chats])
        if self.history == "recorded":
            return replay_dataset(
                source,
                num_sessions=self.num_sessions,
                num_turns=self.num_turns,
                output_len=self.output_len,
                max_characters=self.max_characters,
            )
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
                messages.append({"role": "assistant", "content": self._kept(reply.texts[0], answer)})

        return Session(turns, n_requests=len(script.users))

    def _kept(self, text: str, answer: str | None) -> str:
        """Returns the answer that later prompts have; ``answer`` is the expected one."""
        if answer is None:
            return text
        return answer_line(text, answer) if self.history == "model" else answer


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


def _script_of_generated(chat: SmallTalk) -> _Script:
    return _Script(
        head=[{"role": "system", "content": chat.system}] if chat.system else [],
        users=[{"role": "user", "content": user} for user, _ in chat.turns],
        answers=[answer for _, answer in chat.turns],
    )


def _script_of_recorded(messages: Sequence[Message], n_turns: int) -> _Script:
    users = [message for message in messages if message["role"] == "user"][:n_turns]
    head = [{**message, "role": "system"} for message in messages[:1] if message["role"] in _SYSTEM_ROLES]
    return _Script(head, users, answers=[None] * len(users))


Turn = tuple[str, str]
"""A user message and its answer."""

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer in one short sentence.",
    "You are Tiny, a small and polite helper.",
    "Be brief and kind.",
    "",
)
"""System prompts; the empty one stands for a chat without system prompt."""


class SmallTalk(msgspec.Struct, frozen=True):
    """A generated chat."""

    system: str
    """The system prompt; empty: there is none."""
    turns: tuple[Turn, ...]


class _Statement(msgspec.Struct, frozen=True):
    """A template of a fact that a user states and asks for later."""

    gaps: Gaps
    statement: Turn
    recall: Turn


_STATEMENTS = read_templates("statements", _Statement)


class _User:
    """A user who states facts and asks for them later."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._recalls: list[Turn] = []
        """The questions for the facts that were stated so far, with their answers."""
        self._statements = list(_STATEMENTS)
        rng.shuffle(self._statements)

    def turn(self, is_first: bool) -> Turn:
        """Returns the next turn; about half of the later turns ask for a stated fact."""
        rng = self._rng
        if is_first and rng.random() < 0.6:
            return _greeting(rng)
        if self._recalls and rng.random() < 0.5:
            return rng.choice(self._recalls)
        if self._statements and rng.random() < 0.6:
            template = self._statements.pop()
            values = draw_values(rng, template.gaps)
            self._recalls.append(_filled(template.recall, values))
            return _filled(template.statement, values)
        return rng.choice((_sum, _difference, _next_day, _letter, _repeat, _who, _thanks, _more))(rng)


def generate_chats(seed: int, n_turns: int) -> Iterator[SmallTalk]:
    """Yields endless chats of ``n_turns`` turns; equal arguments give equal chats."""
    rng = random.Random(f"{seed} {n_turns}")
    while True:
        system, user = rng.choice(SYSTEMS), _User(rng)
        yield SmallTalk(system, tuple(user.turn(is_first=index == 0) for index in range(n_turns)))


def _greeting(rng: random.Random) -> Turn:
    said = rng.choice(("Hello", "Hi", "Hello there", "Good morning", "Good evening", "Hey"))
    reply = "Good morning" if "morning" in said else "Good evening" if "evening" in said else "Hello"
    return said + rng.choice(("!", ".", ", how are you?")), f"{reply}! How can I help you?"


def _sum(rng: random.Random) -> Turn:
    one, two = rng.randint(2, 60), rng.randint(2, 30)
    return f"What is {one} plus {two}?", f"{one} + {two} = {one + two}."


def _difference(rng: random.Random) -> Turn:
    one, two = rng.randint(2, 60), rng.randint(2, 30)
    return f"What is {one + two} minus {two}?", f"{one + two} - {two} = {one}."


def _next_day(rng: random.Random) -> Turn:
    days, day = WORDS["days"], rng.randrange(7)
    return f"Which day comes after {days[day]}?", f"{days[(day + 1) % 7]} comes after {days[day]}."


def _letter(rng: random.Random) -> Turn:
    word = rng.choice(WORDS["things"])
    return f"What is the first letter of {word}?", f"The first letter of {word} is {word[0].upper()}."


def _repeat(rng: random.Random) -> Turn:
    words = " ".join(rng.sample((*WORDS["things"], *WORDS["colours"], *WORDS["foods"]), 3))
    return f"Say these words again: {words}", f"{words}."


def _who(rng: random.Random) -> Turn:
    said = rng.choice(("Who are you?", "What are you?", "What is your name?"))
    return said, "I am Tiny, a small language model that comes with radixkv."


def _thanks(rng: random.Random) -> Turn:
    return rng.choice(("Thank you!", "Thanks a lot.", "That is all, thank you.")), "You are welcome!"


def _more(rng: random.Random) -> Turn:
    said = rng.choice(("What can you do?", "Can you help me?", "What do you know?"))
    return said, "I can do small sums, look things up in a text and remember what you tell me."


def _filled(turn: Turn, values: Mapping[str, str | int]) -> Turn:
    user, answer = turn
    return user.format_map(values), answer.format_map(values)
