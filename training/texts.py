"""The texts that the model learns from, with what each part of them counts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from radixkv.bench.workloads.problems.arithmetic import made_problems
from radixkv.bench.workloads.problems.chat import SYSTEMS, Chat, made_chats
from radixkv.bench.workloads.problems.layout import TEACHER, asked, worked
from radixkv.bench.workloads.problems.lookup import about, made_documents
from radixkv.bench.workloads.problems.problem import Problem
from radixkv.bench.workloads.problems.tools import errand_messages, made_errands
from training.tokenizer import BEGIN, END, chat_message, header

HELD_OUT_SEEDS = range(1 << 20)
"""Training draws from other seeds only: scores, tests and workloads have these."""
HELD_OUT_PROBLEMS = 2000
"""Of each seed that the scores use; training leaves out what asks the same as one of these."""

NOTHING, CONTEXT, ANSWER = 0, 1, 10
"""Weights in the loss, in tenths: of what the model should not learn to say, of questions, of answers."""

PROBLEM_TOKENS = 98
FACT_TOKENS = 10.4
LOOKUP_TOKENS = 30
CHAT_TOKENS = 25
ERRAND_TOKENS = 78
"""About as many has one, with its answer."""


class Piece(NamedTuple):
    """A part of a text, and its weight in the loss."""

    text: str
    weight: int


Text = list[Piece]
Message = dict[str, str]
"""Of a chat: ``role`` and ``content``."""


class Texts:
    """Makes texts of all families."""

    def __init__(self, seed: int, held_out: frozenset[str]) -> None:
        """``held_out``: questions of arithmetic to leave out. ``seed``: any number; none is held out."""
        self._rng = random.Random(seed)
        self._held_out = held_out
        self._problems = self._learned_problems()

    def text(self, n_tokens: int) -> Text:
        """One text from its begin-of-text to its end-of-text, of about ``n_tokens``."""
        kinds = (self._few_shot, self._lookup, self._chat, self._errand, self._taught, self._asked_in_chat)
        make = self._rng.choices(kinds, (34, 30, 10, 12, 7, 7))[0]
        return [Piece(BEGIN, NOTHING), *make(n_tokens), Piece(END, ANSWER)]

    def _few_shot(self, n_tokens: int) -> Iterable[Piece]:
        number = self._rng.randint(1, 999)
        opening = self._rng.choices(("", TEACHER, f"{number}. "), (6, 2, 2))[0]
        return [Piece(opening, CONTEXT), *self._answered(self._some_problems(n_tokens // PROBLEM_TOKENS))]

    def _lookup(self, n_tokens: int) -> Iterable[Piece]:
        rng = self._rng
        n_problems = max(1, int(n_tokens * rng.choice((0.1, 0.4, 0.6)) / LOOKUP_TOKENS))
        n_facts = max(n_problems, int((n_tokens - n_problems * LOOKUP_TOKENS) / FACT_TOKENS))
        document = next(made_documents(self._seed(), n_facts, n_problems))
        opening = rng.choices(("", f"{rng.randint(1, 999)}. "), (8, 2))[0]
        return [Piece(opening + about(document), CONTEXT), *self._answered(document.problems)]

    def _chat(self, n_tokens: int) -> Iterable[Piece]:
        return self._said(chat_messages(next(made_chats(self._seed(), max(1, n_tokens // CHAT_TOKENS)))))

    def _errand(self, n_tokens: int) -> Iterable[Piece]:
        return self._said(errand_messages(next(made_errands(self._seed(), max(1, n_tokens // ERRAND_TOKENS)))))

    def _taught(self, n_tokens: int) -> Iterable[Piece]:
        """A chat whose system prompt has worked examples."""
        problems = self._some_problems(n_tokens // PROBLEM_TOKENS)
        n_shots = self._rng.randint(0, len(problems) - 1)
        system = self._rng.choice((TEACHER, "")) + worked(problems[:n_shots])
        return self._said(question_messages(system, problems[n_shots:]))

    def _asked_in_chat(self, n_tokens: int) -> Iterable[Piece]:
        """A chat about a document, which is the system prompt or heads the first question."""
        rng = self._rng
        n_problems = max(1, int(n_tokens * rng.choice((0.1, 0.5)) / LOOKUP_TOKENS))
        n_facts = max(n_problems, int((n_tokens - n_problems * LOOKUP_TOKENS) / FACT_TOKENS))
        document = next(made_documents(self._seed(), n_facts, n_problems))
        if rng.random() < 0.5:
            return self._said(question_messages(rng.choice(SYSTEMS) + "\n\n" + document.text, document.problems))
        first, *others = document.problems
        first = Problem(about(document) + first.question, first.answer)
        return self._said(question_messages(rng.choice(SYSTEMS), [first, *others]))

    def _answered(self, problems: Sequence[Problem]) -> Iterator[Piece]:
        """Questions and answers. Some texts are as a client leaves them that asks for a fixed number of tokens:
        the answer is cut off, or runs on into another question."""
        rng = self._rng
        is_messy = rng.random() < 0.25
        for problem in problems:
            yield Piece(asked(problem), CONTEXT)
            answer = " " + problem.answer
            if is_messy and rng.random() < 0.15:
                yield Piece(_cut(rng, answer), ANSWER)
                yield Piece("\n\n", NOTHING)
                continue
            yield Piece(answer, ANSWER)
            if is_messy and rng.random() < 0.7:
                yield Piece("\n\n", ANSWER)
                yield Piece(_cut(rng, asked(rng.choice(problems)) + " "), NOTHING)
                yield Piece("\n\n", NOTHING)
            else:
                yield Piece("\n\n", CONTEXT)

    def _said(self, messages: Iterable[Message]) -> Iterator[Piece]:
        """A chat. Some have answers that run on into another turn, as ``_answered`` has it."""
        rng = self._rng
        is_messy = rng.random() < 0.25
        for message in messages:
            if message["role"] != "assistant":
                yield Piece(chat_message(message), CONTEXT)
                continue
            yield Piece(header("assistant"), CONTEXT)
            rest = chat_message(message).removeprefix(header("assistant"))
            if is_messy and rng.random() < 0.6:
                yield Piece(message["content"], ANSWER)
                other = next(made_chats(self._seed(), 1)).turns[0]
                yield Piece(_cut(rng, f"user\n\n{other[0]}assistant\n\n{other[1]}"), NOTHING)
                yield Piece(rest.removeprefix(message["content"]), NOTHING)
            else:
                yield Piece(rest, ANSWER)

    def _some_problems(self, count: int) -> list[Problem]:
        return list(islice(self._problems, max(1, count)))

    def _learned_problems(self) -> Iterator[Problem]:
        while True:
            for problem in islice(made_problems(self._seed()), 1000):
                if problem.question not in self._held_out:
                    yield problem

    def _seed(self) -> int:
        return self._rng.randrange(HELD_OUT_SEEDS.stop, 1 << 62)


def chat_messages(chat: Chat) -> list[Message]:
    """As a client sends them, with the answers."""
    messages = [{"role": "system", "content": chat.system}] if chat.system else []
    for user, assistant in chat.turns:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return messages


def question_messages(system: str, problems: Iterable[Problem]) -> list[Message]:
    """A chat of questions, each asked without more ado."""
    messages = [{"role": "system", "content": system}] if system else []
    for problem in problems:
        messages += [
            {"role": "user", "content": problem.question},
            {"role": "assistant", "content": problem.answer},
        ]
    return messages


def held_out_questions(seeds: Iterable[int]) -> frozenset[str]:
    """The questions of arithmetic that training leaves out."""
    return frozenset(
        problem.question for seed in seeds for problem in islice(made_problems(seed), HELD_OUT_PROBLEMS)
    )


def _cut(rng: random.Random, text: str) -> str:
    return text[: rng.randint(1, len(text))]
