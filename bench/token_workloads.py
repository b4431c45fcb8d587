"""Six workloads of token ids, which engines are compared by.

Each function gives phases in order; what is in one phase is handed to the engine at once. The same arguments draw
the same ids. Answers are to be greedy and to ignore the end of sequence; each workload begins with an empty prefix
cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from phases import Phases

VOCAB = 32_000
"""Ids are below it, so that any model's vocabulary has them."""


def single(requests: int = 1, prompt: int = 64, output: int = 256, seed: int = 106) -> Phases:
    """One request alone: the latency of a token."""
    rng = random.Random(seed)
    return [[(_ids(rng, prompt), output)] for _ in range(requests)]


def decode(requests: int = 256, prompt: int = 64, output: int = 512, seed: int = 105) -> Phases:
    """Short prompts, long answers: steps of many rows that share nothing."""
    rng = random.Random(seed)
    return [[(_ids(rng, prompt), output) for _ in range(requests)]]


def unshared(requests: int = 512, prompt: int = 1024, output: int = 128, seed: int = 104) -> Phases:
    """No prefix is shared: what the prefix cache costs where it cannot help."""
    rng = random.Random(seed)
    return [[(_ids(rng, _around(rng, prompt)), output) for _ in range(requests)]]


def fewshot(
    requests: int = 1024,
    shared: int = 1536,
    question: int = 96,
    output: int = 32,
    groups: int = 4,
    seed: int = 101,
) -> Phases:
    """Sets of shots, each shared by many short questions."""
    rng = random.Random(seed)
    shots = [_ids(rng, shared) for _ in range(groups)]
    work = [(shots[i % groups] + _ids(rng, _around(rng, question)), output) for i in range(requests)]
    rng.shuffle(work)
    return [work]


def multiturn(
    sessions: int = 128, turns: int = 6, system: int = 512, user: int = 128, output: int = 128, seed: int = 102
) -> Phases:
    """Chats in lock step: a phase is one turn of each. Filler stands for the model's answers, so that all engines
    see the same prompts."""
    rng = random.Random(seed)
    system_prompt = _ids(rng, system)
    histories = [list(system_prompt) for _ in range(sessions)]
    phases = []
    for _ in range(turns):
        phase = []
        for history in histories:
            history += _ids(rng, _around(rng, user))
            phase.append((list(history), output))
            history += _ids(rng, output)
        phases.append(phase)
    return phases


def agents(
    tasks: int = 64,
    width: int = 4,
    depth: int = 4,
    system: int = 3072,
    step: int = 192,
    output: int = 64,
    seed: int = 103,
) -> Phases:
    """Tree search behind a long prompt of tools: children extend a node's path, and one of them has children."""
    rng = random.Random(seed)
    tools = _ids(rng, system)
    frontier = [tools + _ids(rng, 256) for _ in range(tasks)]
    phases = []
    for _ in range(depth):
        phase, chosen = [], []
        for path in frontier:
            children = [path + _ids(rng, step) for _ in range(width)]
            phase += [(child, output) for child in children]
            chosen.append(children[rng.randrange(width)])
        frontier = chosen
        phases.append(phase)
    return phases


def _ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(10, VOCAB) for _ in range(n)]


def _around(rng: random.Random, n: int) -> int:
    """From half to one and a half."""
    return rng.randint(n // 2, n * 3 // 2)


ALL: Mapping[str, Callable[..., Phases]] = {
    workload.__name__: workload for workload in (single, decode, unshared, fewshot, multiturn, agents)
}
