"""Measures how many held-out problems occur in training, because different seeds may generate equal texts.

    python -m training.overlap

prints a line for each family and size: the percentage of held-out prompts that a sample of the training prompts
contains

    prompt       completely: document or earlier turns, and the question
    question     by the last question alone, in any context
    from_memory  by the last question, whose most frequent answer in the sample is the right one: the score of a
                 model that memorised the sample and ignores the context
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from radixkv.lab.bench.workloads.arithmetic import generate_problems
from radixkv.lab.bench.workloads.chat import generate_chats
from radixkv.lab.bench.workloads.documents import generate_documents
from radixkv.lab.bench.workloads.errands import errand_messages, generate_agent_tasks
from radixkv.lab.bench.workloads.problems import result_of
from training.cases import SEED
from training.conversations import chat_messages
from training.extraction import generate_extractions
from training.made_tools import generate_made_tasks
from training.texts import HELD_OUT_SEEDS

N_HELD_OUT = 500


class Prompt(NamedTuple):
    """A prompt, split into context and last question, with the right answer."""

    context: str
    question: str
    answer: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=20_000, help="training prompts sampled for each line")
    arguments = parser.parse_args()
    for name, generate in GENERATORS.items():
        held_out = list(islice(generate(SEED), N_HELD_OUT))
        line = overlap(held_out, islice(training_prompts(generate), arguments.sample))
        print(json.dumps({"family": name, "held_out": N_HELD_OUT, "sample": arguments.sample, **line}), flush=True)


def training_prompts(generate: Callable[[int], Iterator[Prompt]]) -> Iterator[Prompt]:
    """Yields prompts as training draws them, the first one of each random seed."""
    rng = random.Random(0)
    while True:
        yield next(generate(rng.randrange(HELD_OUT_SEEDS.stop, 1 << 62)))


def overlap(held_out: list[Prompt], sample: Iterator[Prompt]) -> dict[str, float]:
    """Returns the percentages described above by their JSON keys."""
    prompts: set[tuple[str, str]] = set()
    answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for prompt in sample:
        prompts.add((prompt.context, prompt.question))
        answers[prompt.question][prompt.answer] += 1
    counts = {
        "prompt": sum((prompt.context, prompt.question) in prompts for prompt in held_out),
        "question": sum(prompt.question in answers for prompt in held_out),
        "from_memory": sum(
            prompt.question in answers and answers[prompt.question].most_common(1)[0][0] == prompt.answer
            for prompt in held_out
        ),
    }
    return {f"{name}_pct": round(100 * count / len(held_out), 1) for name, count in counts.items()}


def _problems(seed: int) -> Iterator[Prompt]:
    for problem in generate_problems(seed):
        yield Prompt("", problem.question, result_of(problem.answer) or "")


def _documents(n_facts: int) -> Callable[[int], Iterator[Prompt]]:
    def generate(seed: int) -> Iterator[Prompt]:
        for document in generate_documents(seed, n_facts, 1):
            (problem,) = document.problems
            yield Prompt(document.text, problem.question, result_of(problem.answer) or "")

    return generate


def _chats(n_turns: int) -> Callable[[int], Iterator[Prompt]]:
    def generate(seed: int) -> Iterator[Prompt]:
        for chat in generate_chats(seed, n_turns):
            *messages, user, assistant = chat_messages(chat)
            yield Prompt(json.dumps(messages), user["content"], assistant["content"])

    return generate


def _errands(n_errands: int) -> Callable[[int], Iterator[Prompt]]:
    """Returns a generator of errands, whose questions include the results of the tools."""

    def generate(seed: int) -> Iterator[Prompt]:
        for task in generate_agent_tasks(seed, n_errands, is_held_out=seed in HELD_OUT_SEEDS):
            *earlier, errand = task.errands
            context = json.dumps([task.agent.definitions, *(errand_messages(other) for other in earlier)])
            results = [call.result for call in errand.calls]
            yield Prompt(context, json.dumps([errand.user, results]), errand.answer)

    return generate


def _made_requests(seed: int) -> Iterator[Prompt]:
    for chat in generate_made_tasks(seed, 2, is_held_out=seed in HELD_OUT_SEEDS):
        *messages, results, answer = chat.messages
        yield Prompt(json.dumps([chat.tools, messages]), results["content"], answer["content"])


def _extractions(seed: int) -> Iterator[Prompt]:
    for chat in generate_extractions(seed, 1, is_held_out=seed in HELD_OUT_SEEDS):
        *messages, question, answer = chat.messages
        yield Prompt(json.dumps(messages), question["content"], answer["content"])


GENERATORS: dict[str, Callable[[int], Iterator[Prompt]]] = {
    "arithmetic": _problems,
    **{f"lookup, {n_facts} facts": _documents(n_facts) for n_facts in (1, 3, 40)},
    **{f"chat, {n_turns} turns": _chats(n_turns) for n_turns in (1, 2, 3, 6, 20)},
    **{f"agents, {n_errands} errands": _errands(n_errands) for n_errands in (1, 2, 6)},
    "made tools, 2 requests": _made_requests,
    "extraction, 1 record": _extractions,
}


if __name__ == "__main__":
    main()
