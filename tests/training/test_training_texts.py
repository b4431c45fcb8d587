"""Training texts have the form of the workloads' prompts and contain none of the held-out questions."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from radixkv.checkpoints import resolve
from radixkv.lab.bench.session import Prompt, Reply
from radixkv.lab.bench.workloads.agents import Agents
from radixkv.lab.bench.workloads.arithmetic import generate_problems
from radixkv.lab.bench.workloads.base import Source, WorkloadSessions
from radixkv.lab.bench.workloads.chat import Chat
from radixkv.lab.bench.workloads.fewshot import FewShot
from radixkv.lab.bench.workloads.long_document_qa import LongDocumentQA
from radixkv.text.chat_messages import normalize_messages
from radixkv.text.chat_template import ChatTemplate
from support.agent_oracle import next_reply
from support.sessions import collect_turns
from training.cases import SCORE_SEEDS, SEED
from training.chat_format import ChatFormat, Conversation
from training.texts import HELD_OUT_PROBLEMS, HELD_OUT_SEEDS, Texts, held_out_questions

QUESTION = re.compile(r"Question: (.+)\nAnswer: (\S(?:.+\n)*?#### .+)\n\n")
MESSAGE = re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n(.*?)<\|eot_id\|>", re.DOTALL)


@pytest.fixture(scope="module")
def learned() -> list[str]:
    texts = Texts(HELD_OUT_SEEDS.stop + 1, frozenset())
    return ["".join(piece.text for piece in texts.text(600)) for _ in range(400)]


def prompts_of(made: WorkloadSessions, answers: list[str]) -> list[Prompt]:
    """All that a session sends, when it is answered so."""
    (session,) = made.sessions
    turns = session.turns()
    (request,) = next(turns)
    prompts = [request.prompt]
    for answer in answers[:-1]:
        (request,) = turns.send((Reply((answer,)),))
        prompts.append(request.prompt)
    return prompts


def source_of(path: Path, *lines: Any) -> Source:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Source(dataset=path)


def test_worked_examples_are_learned_as_a_workload_sends_them(learned: list[str], tmp_path: Path) -> None:
    n_learned = 0
    for text in learned:
        if text.startswith("<|begin_of_text|>Question: "):
            found = [{"question": question, "answer": answer} for question, answer in QUESTION.findall(text)]
            kind = FewShot(num_prompts=1, num_shots=len(found) - 1)
            (prompt,) = prompts_of(kind.make(source_of(tmp_path / "problems.jsonl", *found)), [""])
            n_learned += text.startswith(f"<|begin_of_text|>{prompt} {found[-1]['answer']}\n\n")
    assert n_learned > 40  # others are as a client leaves them that asks for a fixed number of tokens


def test_documents_are_learned_as_a_workload_sends_them(learned: list[str], tmp_path: Path) -> None:
    n_learned = 0
    for text in learned:
        head, _, rest = text.removeprefix("<|begin_of_text|>").partition("\n\n")
        if head.startswith("Notes on") and (found := QUESTION.findall(rest)):
            question, answer = found[0]
            line = {"text": head, "questions": [{"question": question, "answer": answer}]}
            kind = LongDocumentQA(num_documents=1, num_questions=1)
            (prompt,) = prompts_of(kind.make(source_of(tmp_path / "documents.jsonl", line)), [""])
            n_learned += text.startswith(f"<|begin_of_text|>{prompt} {answer}\n\n")
    assert n_learned > 60


def test_chats_are_learned_as_the_template_renders_what_a_workload_sends(
    learned: list[str], tmp_path: Path
) -> None:
    template = ChatTemplate.load(resolve("tiny").folder)
    assert template is not None
    n_learned = 0
    for text in learned:
        messages = [{"role": role, "content": content} for role, content in MESSAGE.findall(text)]
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        if not messages or "\n" in "".join(answers) or "# Tools" in text:
            continue
        source = source_of(tmp_path / "conversation.jsonl", {"messages": messages})
        sent = prompts_of(Chat(num_sessions=1, num_turns=100).make(source), answers)
        assert len(sent) == len(answers)
        n_learned += all(
            text.startswith(template.render(prompt, add_generation_prompt=True) + answer + "<|eot_id|>")
            for prompt, answer in zip(sent, answers, strict=True)
        )
    assert n_learned > 15


def test_agents_are_learned_as_the_template_renders_what_the_workload_sends() -> None:
    template, chat_format = ChatTemplate.load(resolve("tiny").folder), ChatFormat()
    assert template is not None
    for session in Agents(num_shots=2).make(Source(3)).sessions:
        for turn in collect_turns(session, lambda request: next_reply(request.prompt)):
            (request,) = turn
            assert isinstance(request.prompt, list)
            sent = template.render(normalize_messages(request.prompt), tools=list(request.tools))
            assert sent == chat_format.prompt(Conversation(request.prompt, request.tools))


def test_held_out_questions_are_not_in_training_texts() -> None:
    def questions(held_out: frozenset[str]) -> set[str]:
        texts = Texts(HELD_OUT_SEEDS.stop + 2, held_out)
        whole = "".join(piece.text for _ in range(150) for piece in texts.text(400))
        found = {question for question, _ in QUESTION.findall(whole)}
        return {question for question in found if len(question) > 150}  # those of look-ups are all shorter

    some = frozenset(sorted(questions(frozenset()))[::2])
    assert len(some) > 50
    assert not some & questions(some)


def test_score_cases_and_first_problems_of_workloads_are_held_out() -> None:
    assert {0, SEED} <= set(SCORE_SEEDS)
    asked = {
        problem.question for seed in (0, SEED) for problem in islice(generate_problems(seed), HELD_OUT_PROBLEMS)
    }
    assert asked == held_out_questions((0, SEED))
