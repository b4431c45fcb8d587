"""Problem generators: correct, different and reproducible problems."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from radixkv.lab.bench.workloads.arithmetic import generate_problems
from radixkv.lab.bench.workloads.chat import generate_chats
from radixkv.lab.bench.workloads.documents import document_head, generate_documents
from radixkv.lab.bench.workloads.errands import generate_agent_tasks
from radixkv.lab.bench.workloads.problems import Problem, question_prompt, result_of, worked_examples

MAKERS: dict[str, Callable[[int], Iterator[Any]]] = {
    "arithmetic": generate_problems,
    "lookup": lambda seed: generate_documents(seed, n_facts=20, n_problems=3),
    "tools": lambda seed: generate_agent_tasks(seed, n_errands=3),
    "chat": lambda seed: generate_chats(seed, n_turns=4),
}
RECALLED = re.compile(
    r"(?:Your (?:name|favourite food) is|Your \w+ is called|You live in|You work as a"
    r"|The colour that you like most is|You go to the \w+ club on|You have lent your \w+ to) (\w+)\."
)


def calculated(text: str) -> int:
    node = ast.parse(text.strip(), mode="eval").body
    assert isinstance(node, ast.BinOp)
    kinds = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
    value = kinds[type(node.op)](ast.literal_eval(node.left), ast.literal_eval(node.right))
    assert value == int(value)
    return int(value)


@pytest.mark.parametrize("name", MAKERS)
def test_the_seed_determines_the_problems(name: str) -> None:
    first, again, other = (list(islice(MAKERS[name](seed), 50)) for seed in (3, 3, 4))
    assert first == again
    assert not any(item in other for item in first)


def test_every_step_of_arithmetic_is_correct_and_small_and_the_last_is_the_result() -> None:
    for problem in islice(generate_problems(1), 3000):
        steps = re.findall(r"(\d+ [*/+-] \d+) = \$?(\d+)", problem.answer)
        assert len(steps) == len(problem.answer.splitlines()) - 1
        for left, right in steps:
            assert calculated(left) == int(right) < 1000, problem
            if "*" in left:
                one, _, two = left.split()
                assert int(one) <= 12 >= int(two) or min(len(one), len(two)) == 1, problem
        assert result_of(problem.answer) == steps[-1][1]


def test_arithmetic_uses_numbers_of_its_question_and_of_earlier_steps() -> None:
    for problem in islice(generate_problems(2), 1000):
        known = {*re.findall(r"\d+", problem.question), "2"}  # twice the sides of a rectangle
        for left, right in re.findall(r"(\d+ [*/+-] \d+) = \$?(\d+)", problem.answer):
            assert set(re.findall(r"\d+", left)) <= known, problem
            known.add(right)


def test_arithmetic_questions_are_long_and_never_repeated() -> None:
    problems = list(islice(generate_problems(0), 20_000))
    assert len({problem.question for problem in problems}) == len(problems)
    assert 40 <= sum(len(problem.question.split()) for problem in problems) / len(problems) <= 60


def test_the_result_of_a_look_up_is_in_one_sentence_of_the_document() -> None:
    for document in islice(generate_documents(5, n_facts=120, n_problems=40), 20):
        sentences = re.split(r"(?<=\.)\s|:\n|\n", document.text)
        assert len(sentences) == 121  # 120 facts and the title
        for problem in document.problems:
            sentence, _, rest = problem.answer.partition("\n")
            assert sentences.count(sentence) == 1
            assert result_of(problem.answer) == rest.removeprefix("#### ").removeprefix("$")
            assert rest.removeprefix("#### ") in sentence
            assert problem.question.endswith("?")


def test_a_look_up_has_one_answer() -> None:
    """Without its result, each fact is stated once."""
    for document in islice(generate_documents(6, n_facts=300, n_problems=300), 3):
        assert len({problem.question for problem in document.problems}) == 300
        keys: set[str] = set()
        for problem in document.problems:
            sentence = problem.answer.partition("\n")[0]
            result = problem.answer.rpartition("#### ")[2]
            keys.add(sentence.replace(result, "_"))
        assert len(keys) == 300


def test_a_chat_recalls_stated_facts() -> None:
    recalled: set[str] = set()
    for chat in islice(generate_chats(2, n_turns=12), 200):
        said = ""
        for user, assistant in chat.turns:
            if match := RECALLED.fullmatch(assistant):
                assert re.search(rf"\b{match[1]}\b", said), chat
                recalled.add(match[0].removesuffix(f"{match[1]}."))
            if match := re.fullmatch(r"What is (\d+) (plus|minus) (\d+)\?", user):
                sign = "+" if match[2] == "plus" else "-"
                assert assistant.endswith(f"= {calculated(f'{match[1]} {sign} {match[3]}')}.")
            said += user + "\n"
    assert len(recalled) > 20


def test_a_prompt_has_worked_examples_before_an_open_question() -> None:
    one, two = Problem("1 + 1?", "2\n#### 2"), Problem("Who?", "She.\n#### She")
    assert worked_examples([one, two]) + question_prompt(two) == (
        "Question: 1 + 1?\nAnswer: 2\n#### 2\n\nQuestion: Who?\nAnswer: She.\n#### She\n\nQuestion: Who?\nAnswer:"
    )
    document = next(generate_documents(0, 3, 1))
    assert document_head(document) == document.text + "\n\n"


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("6 * 7 = 42.\n#### 42\n\nQuestion: 1\n#### 3", "42"),
        ("#### $1,024.", "1024"),
        ("#### garden shed ", "garden shed"),
        ("####", None),
        ("42", None),
    ],
)
def test_the_first_result_counts(text: str, result: str | None) -> None:
    assert result_of(text) == result
