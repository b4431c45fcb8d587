"""Generator of the training texts with the loss weight of each part."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from radixkv.lab.bench.workloads.arithmetic import generate_problems
from radixkv.lab.bench.workloads.chat import SYSTEMS, generate_chats
from radixkv.lab.bench.workloads.documents import document_head, generate_documents
from radixkv.lab.bench.workloads.errands import generate_agent_tasks
from radixkv.lab.bench.workloads.problems import TEACHER_PROMPT, Problem, question_prompt, worked_examples
from training.chat_format import BEGIN, END, END_OF_TURN, THINK, ChatFormat, Conversation
from training.conversations import (
    agent_conversation,
    chat_messages,
    question_messages,
    with_reasoning,
    without_earlier_reasoning,
)
from training.extraction import generate_extractions
from training.made_tools import generate_made_tasks

HELD_OUT_SEEDS = range(1 << 20)
"""Seeds reserved for scores, tests and workloads; training uses only larger ones."""
HELD_OUT_PROBLEMS = 2000
"""Number of problems per scored seed whose questions training leaves out."""

IGNORED, CONTEXT, ANSWER = 0, 1, 10
"""Loss weights in tenths: of text that the model should not learn to write, of context such as questions, of
answers."""

PROBLEM_TOKENS = 98
FACT_TOKENS = 10.4
LOOKUP_TOKENS = 30
CHAT_TOKENS = 25
TOOLS_TOKENS = 340
ERRAND_TOKENS = 125
RECORD_TOKENS = 60
"""Approximate tokens of one problem, fact, document question, chat turn, the tools of a task, errand, and record to
extract; answers included."""


class TextPart(NamedTuple):
    """A part of a training text with its weight in the loss."""

    text: str
    weight: int


Text = list[TextPart]


class Texts:
    """Generates training texts of all problem families."""

    def __init__(self, seed: int, held_out: frozenset[str]) -> None:
        """Starts the generator.

        Args:
            seed: any integer; the problems' own seeds are drawn outside ``HELD_OUT_SEEDS``.
            held_out: arithmetic questions to leave out.
        """
        self._rng = random.Random(seed)
        self._held_out = held_out
        self._problems = self._training_problems()
        self._format = ChatFormat()

    def text(self, n_tokens: int) -> Text:
        """Returns one text of about ``n_tokens``, with its begin-of-text and end-of-text tokens.

        A text with tools or a schema has some 500 tokens, even if fewer are asked for.
        """
        kinds = (
            self._few_shot,
            self._lookup,
            self._chat,
            self._few_shot_chat,
            self._document_chat,
            self._agent_task,
            self._extraction,
        )
        generate = self._rng.choices(kinds, (23, 20, 8, 8, 8, 20, 13))[0]
        return [TextPart(BEGIN, IGNORED), *generate(n_tokens), TextPart(END, ANSWER)]

    def _few_shot(self, n_tokens: int) -> Iterable[TextPart]:
        number = self._rng.randint(1, 999)
        opening = self._rng.choices(("", TEACHER_PROMPT, f"{number}. "), (6, 2, 2))[0]
        return [TextPart(opening, CONTEXT), *self._question_parts(self._some_problems(n_tokens // PROBLEM_TOKENS))]

    def _lookup(self, n_tokens: int) -> Iterable[TextPart]:
        rng = self._rng
        n_problems = max(1, int(n_tokens * rng.choice((0.1, 0.4, 0.6)) / LOOKUP_TOKENS))
        n_facts = max(n_problems, int((n_tokens - n_problems * LOOKUP_TOKENS) / FACT_TOKENS))
        document = next(generate_documents(self._seed(), n_facts, n_problems))
        opening = rng.choices(("", f"{rng.randint(1, 999)}. "), (8, 2))[0]
        return [TextPart(opening + document_head(document), CONTEXT), *self._question_parts(document.problems)]

    def _chat(self, n_tokens: int) -> Iterable[TextPart]:
        thinks = self._rng.random() < 0.15
        chat = next(generate_chats(self._seed(), max(1, n_tokens // CHAT_TOKENS)))
        return self._chat_parts(Conversation(chat_messages(chat, thinks=thinks), enable_thinking=thinks))

    def _agent_task(self, n_tokens: int) -> Iterable[TextPart]:
        n_errands = max(1, (n_tokens - TOOLS_TOKENS) // ERRAND_TOKENS)
        if self._rng.random() < 0.4:
            task = next(generate_agent_tasks(self._seed(), n_errands, is_held_out=False))
            conversation = agent_conversation(task)
        else:
            conversation = next(generate_made_tasks(self._seed(), n_errands, is_held_out=False))
        return self._chat_parts(with_reasoning(conversation) if self._rng.random() < 0.2 else conversation)

    def _extraction(self, n_tokens: int) -> Iterable[TextPart]:
        n_records = self._rng.choice((1, 1, 1, max(1, (n_tokens - 2 * RECORD_TOKENS) // RECORD_TOKENS)))
        return self._chat_parts(next(generate_extractions(self._seed(), n_records, is_held_out=False)))

    def _few_shot_chat(self, n_tokens: int) -> Iterable[TextPart]:
        """Returns a chat whose system prompt contains worked examples."""
        rng = self._rng
        problems = self._some_problems(n_tokens // PROBLEM_TOKENS)
        n_shots = rng.randint(0, len(problems) - 1) if rng.random() < 0.7 else 0
        system = rng.choice((TEACHER_PROMPT, "")) + worked_examples(problems[:n_shots])
        return self._question_chat(system, problems[n_shots:])

    def _document_chat(self, n_tokens: int) -> Iterable[TextPart]:
        """Returns a chat about a document, which is in the system prompt or before the first question."""
        rng = self._rng
        n_problems = max(1, int(n_tokens * rng.choice((0.1, 0.5)) / LOOKUP_TOKENS))
        n_facts = max(n_problems, int((n_tokens - n_problems * LOOKUP_TOKENS) / FACT_TOKENS))
        document = next(generate_documents(self._seed(), n_facts, n_problems))
        if rng.random() < 0.5:
            return self._question_chat(rng.choice(SYSTEMS) + "\n\n" + document.text, document.problems)
        first, *others = document.problems
        first = Problem(document_head(document) + first.question, first.answer)
        return self._question_chat(rng.choice(SYSTEMS), [first, *others])

    def _question_chat(self, system: str, problems: Sequence[Problem]) -> Iterable[TextPart]:
        thinks = self._rng.random() < 0.35
        return self._chat_parts(
            Conversation(question_messages(system, problems, thinks=thinks), enable_thinking=thinks)
        )

    def _question_parts(self, problems: Sequence[Problem]) -> Iterator[TextPart]:
        """Yields questions and answers.

        A quarter of the texts imitates clients that request a fixed number of tokens: answers may be cut off or
        continue with another question.
        """
        rng = self._rng
        is_messy = rng.random() < 0.25
        for problem in problems:
            yield TextPart(question_prompt(problem), CONTEXT)
            answer = " " + problem.answer
            if is_messy and rng.random() < 0.15:
                yield TextPart(_cut(rng, answer), ANSWER)
                yield TextPart("\n\n", IGNORED)
                continue
            yield TextPart(answer, ANSWER)
            if is_messy and rng.random() < 0.7:
                yield TextPart("\n\n", ANSWER)
                yield TextPart(_cut(rng, question_prompt(rng.choice(problems)) + " "), IGNORED)
                yield TextPart("\n\n", IGNORED)
            else:
                yield TextPart("\n\n", CONTEXT)

    def _chat_parts(self, conversation: Conversation) -> Iterator[TextPart]:
        """Yields the parts of a chat, except the begin-of-text token.

        In a quarter of the plain chats answers may continue with another turn. In half of the chats with thinking
        the reasoning of earlier turns is missing, as when a client does not return it.
        """
        rng = self._rng
        thinks = conversation.enable_thinking
        is_messy = not thinks and not conversation.tools and rng.random() < 0.25
        if thinks and rng.random() < 0.5:
            conversation = without_earlier_reasoning(conversation)
        for text, is_answer in self._format.parts(conversation):
            if not is_answer:
                yield TextPart(text.removeprefix(BEGIN), CONTEXT)
            elif is_messy and rng.random() < 0.6:
                yield TextPart(text.removesuffix(END_OF_TURN), ANSWER)
                other = next(generate_chats(self._seed(), 1)).turns[0]
                yield TextPart(_cut(rng, f"user\n\n{other[0]}assistant\n\n{other[1]}"), IGNORED)
                yield TextPart(END_OF_TURN, IGNORED)
            else:
                yield TextPart(text, IGNORED if thinks and not text.startswith(THINK) else ANSWER)

    def _some_problems(self, count: int) -> list[Problem]:
        return list(islice(self._problems, max(1, count)))

    def _training_problems(self) -> Iterator[Problem]:
        while True:
            for problem in islice(generate_problems(self._seed()), 1000):
                if problem.question not in self._held_out:
                    yield problem

    def _seed(self) -> int:
        return self._rng.randrange(HELD_OUT_SEEDS.stop, 1 << 62)


def held_out_questions(seeds: Iterable[int]) -> frozenset[str]:
    """Returns the arithmetic questions that training leaves out."""
    return frozenset(
        problem.question for seed in seeds for problem in islice(generate_problems(seed), HELD_OUT_PROBLEMS)
    )


def _cut(rng: random.Random, text: str) -> str:
    return text[: rng.randint(1, len(text))]
