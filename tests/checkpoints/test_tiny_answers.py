"""The embedded model answers held-out problems of its families right, and wrongly when a page is another's."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest

from radixkv.bench.workloads.problems.arithmetic import made_problems
from radixkv.bench.workloads.problems.chat import made_chats
from radixkv.bench.workloads.problems.layout import asked, worked
from radixkv.bench.workloads.problems.lookup import about, made_documents
from radixkv.bench.workloads.problems.problem import Problem, result_of
from radixkv.bench.workloads.problems.tools import made_errands
from radixkv.checkpoints import resolve
from radixkv.llm import LLM, RequestOutput
from radixkv.sampling import SamplingParams
from radixkv.text.tokenizer import Tokenizer
from support.wrong_page import mixed_up, pages_of

SEED = 11
"""Training left out what it makes."""
PAGE_SIZE = 16
MIN = 0.9
"""The share that must be right. The model card has the scores, of many more problems."""
ANSWER = SamplingParams(temperature=0.0, max_tokens=72, stop=("\n\n",))
MESSAGE = SamplingParams(temperature=0.0, max_tokens=72)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(device="cpu", page_size=PAGE_SIZE, max_total_tokens=16_384, max_model_len=4096)
    yield llm
    llm.shutdown()


def shots(n_problems: int, n_shots: int) -> tuple[list[str], list[Problem]]:
    """Prompts that begin with the same worked examples, and what they ask."""
    examples = worked(islice(made_problems(SEED), n_shots))
    problems = list(islice(made_problems(SEED + 1), n_problems))
    return [examples + asked(problem) for problem in problems], problems


def text_of(output: RequestOutput) -> str:
    return output.outputs[0].text


def share_right(outputs: Sequence[RequestOutput], problems: Sequence[Problem]) -> float:
    rights = [
        result_of(text_of(output)) == result_of(problem.answer)
        for output, problem in zip(outputs, problems, strict=True)
    ]
    return sum(rights) / len(rights)


def test_it_solves_problems_with_examples(llm: LLM) -> None:
    prompts, problems = shots(28, n_shots=8)
    assert share_right(llm.generate(prompts, ANSWER), problems) >= MIN


def test_it_finds_facts_in_documents(llm: LLM) -> None:
    documents = list(islice(made_documents(SEED, n_facts=70, n_problems=8), 3))
    prompts = [about(document) + asked(problem) for document in documents for problem in document.problems]
    problems = [problem for document in documents for problem in document.problems]
    assert share_right(llm.generate(prompts, ANSWER), problems) >= MIN


def test_it_calls_tools_and_tells_what_they_say(llm: LLM) -> None:
    chats: list[list[dict[str, Any]]] = []
    answers: list[str] = []
    for errand in islice(made_errands(SEED, n_turns=2), 10):
        messages = [{"role": "system", "content": errand.system}]
        for turn in errand.turns:
            messages.append({"role": "user", "content": turn.user})
            chats.append(list(messages))
            messages += [{"role": "assistant", "content": turn.call}, {"role": "tool", "content": turn.result}]
            chats.append(list(messages))
            messages.append({"role": "assistant", "content": turn.answer})
            answers += [turn.call, turn.answer]
    rights = [
        as_call(text_of(output)) == as_call(answer)
        for output, answer in zip(llm.chat(chats, MESSAGE), answers, strict=True)
    ]
    assert sum(rights) / len(rights) >= MIN


def as_call(text: str) -> Mapping[str, Any] | str:
    """JSON as what it says, and any other text as it is."""
    try:
        call: Mapping[str, Any] = json.loads(text)
    except ValueError:
        return text
    return call


def test_it_chats_and_remembers(llm: LLM) -> None:
    chats: list[list[dict[str, str]]] = []
    answers: list[str] = []
    for chat in islice(made_chats(SEED, n_turns=5), 8):
        messages = [{"role": "system", "content": chat.system}] if chat.system else []
        for user, answer in chat.turns:
            messages.append({"role": "user", "content": user})
            chats.append(list(messages))
            messages.append({"role": "assistant", "content": answer})
            answers.append(answer)
    rights = [text_of(output) == answer for output, answer in zip(llm.chat(chats, MESSAGE), answers, strict=True)]
    assert sum(rights) / len(rights) >= MIN


def test_the_cache_changes_no_answer(llm: LLM) -> None:
    prompts, _ = shots(5, n_shots=5)
    without = LLM(device="cpu", enable_prefix_caching=False, max_total_tokens=16_384, max_model_len=4096)
    expected = without.generate(prompts, ANSWER)
    llm.flush_cache()
    filling, filled = llm.generate(prompts, ANSWER), llm.generate(prompts, ANSWER)
    assert [output.num_cached_tokens for output in expected] == [0] * 5
    assert min(output.num_cached_tokens for output in filled) > 400
    for found in (filling, filled):
        assert [output.outputs for output in found] == [output.outputs for output in expected]


def test_a_page_of_another_document_gives_that_ones_answer(llm: LLM) -> None:
    """Twin documents differ in one code, within one page; each is then read with the other's page."""
    prompts, codes = zip(*islice(twins(), 8), strict=True)
    ours, theirs = [pair[0] for pair in prompts], [pair[1] for pair in prompts]
    right = [result_of(text_of(output)) for output in llm.generate(ours, ANSWER)]
    llm.generate(theirs, ANSWER)
    assert sum(found == code for found, (code, _) in zip(right, codes, strict=True)) >= 7
    wrong_pages: dict[int, int] = {}
    for one, other in prompts:
        place = difference(one, other)[0] // PAGE_SIZE
        wrong_pages[pages_of(llm, one)[place]] = pages_of(llm, other)[place]
    assert len(wrong_pages) == 8
    with mixed_up(llm, wrong_pages):
        wrong = [result_of(text_of(output)) for output in llm.generate(ours, ANSWER)]
    llm.flush_cache()  # of answers that were computed from wrong pages
    assert sum(found == code for found, (_, code) in zip(wrong, codes, strict=True)) >= 7
    assert sum(found == code for found, (code, _) in zip(wrong, codes, strict=True)) <= 1


def twins() -> Iterator[tuple[tuple[list[int], list[int]], tuple[str, str]]]:
    """Token ids of two prompts that ask for the code that they differ in, and both codes."""
    rng, tokenizer = random.Random(SEED), Tokenizer.load(resolve("tiny").folder)
    for document in made_documents(SEED, n_facts=30, n_problems=30):
        problem = next((each for each in document.problems if each.question.startswith("What is the code")), None)
        if problem is None:
            continue
        code, other = str(result_of(problem.answer)), str(rng.randint(1000, 9999))
        sentence = problem.answer.partition("\n")[0]
        assert document.text.count(sentence) == 1
        text = about(document) + asked(problem)
        twin = text.replace(sentence, sentence.replace(code, other))
        one, two = (np.frombuffer(tokenizer.encode(each), "<i4").tolist() for each in (text, twin))
        places = difference(one, two)
        if len(one) == len(two) and places and places[0] // PAGE_SIZE == places[-1] // PAGE_SIZE:
            yield (one, two), (code, other)


def difference(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
