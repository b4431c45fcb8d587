"""How much of the held-out problems training has seen: made texts of other seeds may still come out alike.

    python -m training.overlap

prints a line for each family and size. Of so many held-out prompts, percent that a sample of training has had

    prompt       as a whole: document or earlier turns, and the question
    question     the last question alone, in whatever context
    from_memory  with the last question, whose most frequent answer there is the right one: what a model would get
                 right that knows training by heart and ignores the context
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from radixkv.bench.workloads.problems.arithmetic import made_problems
from radixkv.bench.workloads.problems.chat import made_chats
from radixkv.bench.workloads.problems.lookup import made_documents
from radixkv.bench.workloads.problems.problem import result_of
from radixkv.bench.workloads.problems.tools import errand_messages, made_errands
from training.cases import SEED
from training.texts import HELD_OUT_SEEDS, chat_messages

N_HELD_OUT = 500


class Asked(NamedTuple):
    """A prompt's parts, and the right answer."""

    context: str
    question: str
    answer: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=20_000, help="prompts of training, for each line")
    arguments = parser.parse_args()
    for name, make in MAKERS.items():
        held_out = list(islice(make(SEED), N_HELD_OUT))
        line = overlap(held_out, islice(learned(make), arguments.sample))
        print(json.dumps({"family": name, "held_out": N_HELD_OUT, "sample": arguments.sample, **line}), flush=True)


def learned(make: Callable[[int], Iterator[Asked]]) -> Iterator[Asked]:
    """What training draws: one of each seed."""
    rng = random.Random(0)
    while True:
        yield next(make(rng.randrange(HELD_OUT_SEEDS.stop, 1 << 62)))


def overlap(held_out: list[Asked], sample: Iterator[Asked]) -> dict[str, float]:
    """The percentages."""
    prompts: set[tuple[str, str]] = set()
    answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for asked in sample:
        prompts.add((asked.context, asked.question))
        answers[asked.question][asked.answer] += 1
    counts = {
        "prompt": sum((asked.context, asked.question) in prompts for asked in held_out),
        "question": sum(asked.question in answers for asked in held_out),
        "from_memory": sum(
            asked.question in answers and answers[asked.question].most_common(1)[0][0] == asked.answer
            for asked in held_out
        ),
    }
    return {f"{name}_pct": round(100 * count / len(held_out), 1) for name, count in counts.items()}


def _problems(seed: int) -> Iterator[Asked]:
    for problem in made_problems(seed):
        yield Asked("", problem.question, result_of(problem.answer) or "")


def _documents(n_facts: int) -> Callable[[int], Iterator[Asked]]:
    def make(seed: int) -> Iterator[Asked]:
        for document in made_documents(seed, n_facts, 1):
            (problem,) = document.problems
            yield Asked(document.text, problem.question, result_of(problem.answer) or "")

    return make


def _chats(n_turns: int) -> Callable[[int], Iterator[Asked]]:
    def make(seed: int) -> Iterator[Asked]:
        for chat in made_chats(seed, n_turns):
            *said, user, assistant = chat_messages(chat)
            yield Asked(json.dumps(said), user["content"], assistant["content"])

    return make


def _calls(n_turns: int) -> Callable[[int], Iterator[Asked]]:
    def make(seed: int) -> Iterator[Asked]:
        for errand in made_errands(seed, n_turns):
            *said, user, call, _, _ = errand_messages(errand)
            yield Asked(json.dumps(said), user["content"], call["content"])

    return make


def _results(n_turns: int) -> Callable[[int], Iterator[Asked]]:
    def make(seed: int) -> Iterator[Asked]:
        for errand in made_errands(seed, n_turns):
            *said, user, _, result, answer = errand_messages(errand)
            yield Asked(json.dumps(said), user["content"] + result["content"], answer["content"])

    return make


MAKERS: dict[str, Callable[[int], Iterator[Asked]]] = {
    "arithmetic": _problems,
    **{f"lookup, {n_facts} facts": _documents(n_facts) for n_facts in (1, 3, 40)},
    **{f"chat, {n_turns} turns": _chats(n_turns) for n_turns in (1, 2, 3, 6, 20)},
    **{f"tools, call, {n_turns} turns": _calls(n_turns) for n_turns in (1, 2, 6)},
    **{f"tools, answer, {n_turns} turns": _results(n_turns) for n_turns in (1, 2, 6)},
}


if __name__ == "__main__":
    main()
