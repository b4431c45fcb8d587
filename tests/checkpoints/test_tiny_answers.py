"""Tests that the embedded model solves held-out problems, and that a wrong KV page changes its answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import pytest

from radixkv.checkpoints import resolve
from radixkv.lab.bench.workloads.arithmetic import generate_problems
from radixkv.lab.bench.workloads.chat import generate_chats
from radixkv.lab.bench.workloads.documents import document_head, generate_documents
from radixkv.lab.bench.workloads.problems import Problem, question_prompt, result_of, worked_examples
from radixkv.llm import LLM, RequestOutput
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.sampling import SamplingParams
from support.cases import rest_nightly
from support.cpu_server import CpuServer
from training.cases import OUTPUT_TOKENS, cases, count_right
from training.chat_format import Conversation

SEED = 11
"""Training excludes the problems of this seed."""
PAGE_SIZE = 16
MIN_SHARE_RIGHT = 0.9
"""Minimum share of right answers. The model card has the scores on many more problems."""
ANSWER = SamplingParams(temperature=0.0, max_tokens=72, stop=("\n\n",))
MESSAGE = SamplingParams(temperature=0.0, max_tokens=72)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(device="cpu", page_size=PAGE_SIZE, max_total_tokens=16_384, max_model_len=4096)
    yield llm
    llm.shutdown()


def few_shot_prompts(n_problems: int, n_shots: int) -> tuple[list[str], list[Problem]]:
    """Returns prompts that start with the same worked examples, and their problems."""
    examples = worked_examples(islice(generate_problems(SEED), n_shots))
    problems = list(islice(generate_problems(SEED + 1), n_problems))
    return [examples + question_prompt(problem) for problem in problems], problems


def text_of(output: RequestOutput) -> str:
    return output.outputs[0].text


def share_right(outputs: Sequence[RequestOutput], problems: Sequence[Problem]) -> float:
    rights = [
        result_of(text_of(output)) == result_of(problem.answer)
        for output, problem in zip(outputs, problems, strict=True)
    ]
    return sum(rights) / len(rights)


def test_it_solves_problems_with_examples(llm: LLM) -> None:
    prompts, problems = few_shot_prompts(14, n_shots=8)
    assert share_right(llm.generate(prompts, ANSWER), problems) >= MIN_SHARE_RIGHT


@pytest.mark.nightly
def test_it_finds_facts_in_documents(llm: LLM) -> None:
    documents = list(islice(generate_documents(SEED, n_facts=70, n_problems=8), 2))
    prompts = [
        document_head(document) + question_prompt(problem)
        for document in documents
        for problem in document.problems
    ]
    problems = [problem for document in documents for problem in document.problems]
    assert share_right(llm.generate(prompts, ANSWER), problems) >= MIN_SHARE_RIGHT


@pytest.mark.nightly
@pytest.mark.parametrize("n", rest_nightly([4, 20], kept=(0,)))
@pytest.mark.parametrize("family", rest_nightly(["agents", "made_tools", "extraction", "reasoning"], kept=(1, 3)))
def test_it_calls_tools_extracts_and_thinks(llm: LLM, family: str, n: int) -> None:
    chosen = list(islice(cases(family, 700), n))
    prompts = [
        llm.chat_prompt(step.prompt.messages, chat_template_kwargs=step.prompt.template_variables)
        for case in chosen
        for step in case.steps
        if isinstance(step.prompt, Conversation)
    ]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS))
    assert count_right(chosen, map(text_of, outputs)) >= MIN_SHARE_RIGHT * len(chosen)


@pytest.mark.nightly
def test_it_chats_and_remembers(llm: LLM) -> None:
    chats: list[list[dict[str, str]]] = []
    answers: list[str] = []
    for chat in islice(generate_chats(SEED, n_turns=5), 8):
        messages = [{"role": "system", "content": chat.system}] if chat.system else []
        for user, answer in chat.turns:
            messages.append({"role": "user", "content": user})
            chats.append(list(messages))
            messages.append({"role": "assistant", "content": answer})
            answers.append(answer)
    rights = [text_of(output) == answer for output, answer in zip(llm.chat(chats, MESSAGE), answers, strict=True)]
    assert sum(rights) / len(rights) >= MIN_SHARE_RIGHT


@pytest.mark.nightly
def test_the_prefix_cache_changes_no_answer(llm: LLM) -> None:
    prompts, _ = few_shot_prompts(5, n_shots=5)
    without = LLM(device="cpu", enable_prefix_caching=False, max_total_tokens=16_384, max_model_len=4096)
    expected = without.generate(prompts, ANSWER)
    llm.flush_cache()
    filling, filled = llm.generate(prompts, ANSWER), llm.generate(prompts, ANSWER)
    assert [output.num_cached_tokens for output in expected] == [0] * 5
    assert min(output.num_cached_tokens for output in filled) > 400
    for answer in (filling, filled):
        assert [output.outputs for output in answer] == [output.outputs for output in expected]


@pytest.mark.nightly
def test_a_page_of_another_document_gives_the_other_answer() -> None:
    """Pairs of documents differ in one code, within one page; each answer is computed with the other's page."""
    prompts, codes = zip(*islice(twin_prompts(), 8), strict=True)
    ours, theirs = [pair[0] for pair in prompts], [pair[1] for pair in prompts]
    checkpoint = resolve("tiny")
    tokenizer = Tokenizer.load(checkpoint.folder)
    server = CpuServer(checkpoint, n_pages=1024, page_size=PAGE_SIZE, budget=2048, max_model_len=4096)

    def answers(prompts: Sequence[list[int]]) -> list[object]:
        for number, prompt in enumerate(prompts):
            server.add(number, prompt, 72, temperature=0.0)
        server.run()
        texts = [tokenizer.decode(server.outputs[number].tokens) for number in range(len(prompts))]
        return [result_of(text.partition("\n\n")[0]) for text in texts]

    right = answers(ours)
    answers(theirs)
    assert sum(answer == code for answer, (code, _) in zip(right, codes, strict=True)) >= 7
    wrong_pages: dict[int, int] = {}
    for first, other in prompts:
        page = differing_positions(first, other)[0] // PAGE_SIZE
        wrong_pages[server.cached_pages(first)[page]] = server.cached_pages(other)[page]
    assert len(wrong_pages) == 8
    with server.swapped_pages(wrong_pages):
        wrong = answers(ours)
    assert sum(answer == code for answer, (_, code) in zip(wrong, codes, strict=True)) >= 7
    assert sum(answer == code for answer, (code, _) in zip(wrong, codes, strict=True)) <= 1


def twin_prompts() -> Iterator[tuple[tuple[list[int], list[int]], tuple[str, str]]]:
    """Yields the token ids of two prompts that ask for the code in which they differ, and both codes."""
    rng, tokenizer = random.Random(SEED), Tokenizer.load(resolve("tiny").folder)
    for document in generate_documents(SEED, n_facts=30, n_problems=30):
        problem = next((each for each in document.problems if each.question.startswith("What is the code")), None)
        if problem is None:
            continue
        code, other = str(result_of(problem.answer)), str(rng.randint(1000, 9999))
        sentence = problem.answer.partition("\n")[0]
        assert document.text.count(sentence) == 1
        text = document_head(document) + question_prompt(problem)
        twin = text.replace(sentence, sentence.replace(code, other))
        first, second = (np.frombuffer(tokenizer.encode(each), "<i4").tolist() for each in (text, twin))
        positions = differing_positions(first, second)
        if len(first) == len(second) and positions and positions[0] // PAGE_SIZE == positions[-1] // PAGE_SIZE:
            yield (first, second), (code, other)


def differing_positions(first: Sequence[int], other: Sequence[int]) -> list[int]:
    return [index for index, (a, b) in enumerate(zip(first, other, strict=False)) if a != b]
