"""Workloads of token ids: eight for comparing engines, or those of another Python file.

Each function of ``ALL`` returns phases in order; the requests of a phase are sent to the engine together. Equal
arguments give equal ids. Answers must be greedy and ignore the end of sequence, and each workload starts with an
empty prefix cache.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Phases = Sequence[Sequence[tuple[list[int], int]]]
"""A workload: phases of requests that are sent together, each as token ids and a number of new tokens."""

Workloads = Mapping[str, Callable[..., Phases]]
"""Functions that generate workloads, by name; their arguments are sizes."""

VOCAB = 32_000
"""Ids are below this, so that they are in any model's vocabulary."""


def single(requests: int = 1, prompt: int = 64, output: int = 256, seed: int = 106) -> Phases:
    """Generates one request at a time, for the latency of a token."""
    rng = random.Random(seed)
    return [[(_ids(rng, prompt), output)] for _ in range(requests)]


def decode(requests: int = 256, prompt: int = 64, output: int = 512, seed: int = 105) -> Phases:
    """Generates short prompts with long answers: decode steps of many rows without shared prefixes."""
    rng = random.Random(seed)
    return [[(_ids(rng, prompt), output) for _ in range(requests)]]


def unshared(requests: int = 512, prompt: int = 1024, output: int = 128, seed: int = 104) -> Phases:
    """Generates prompts without shared prefixes, for the cost of the prefix cache where it cannot help."""
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
    """Generates few-shot prompts: sets of examples, each shared by many short questions."""
    rng = random.Random(seed)
    shots = [_ids(rng, shared) for _ in range(groups)]
    prompts = [(shots[i % groups] + _ids(rng, _around(rng, question)), output) for i in range(requests)]
    rng.shuffle(prompts)
    return [prompts]


def multiturn(
    sessions: int = 128, turns: int = 6, system: int = 512, user: int = 128, output: int = 128, seed: int = 102
) -> Phases:
    """Generates chats in lock step: a phase is one turn of each chat.

    Random ids stand for the model's answers, so that all engines get the same prompts.
    """
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
    """Generates tree search after a long prompt: children extend a node's path, and one of them gets children."""
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


def pressure(
    sessions: int = 160,
    turns: int = 4,
    first: int = 2444,
    user: int = 100,
    output: int = 64,
    in_flight: int = 32,
    seed: int = 107,
) -> Phases:
    """Generates chats that return after all others: 480k tokens, for a pool of 128k.

    A phase is one turn of ``in_flight`` chats; all chats take a turn before the first takes its next. A pool that
    holds all of them is under no pressure. Random ids stand for the model's answers, as in ``multiturn``.
    """
    rng = random.Random(seed)
    chats = [_ids(rng, first) for _ in range(sessions)]
    phases = []
    for turn in range(turns):
        if turn:
            for chat in chats:
                chat += _ids(rng, output + _around(rng, user))
        requests = [(list(chat), output) for chat in chats]
        phases += [requests[start : start + in_flight] for start in range(0, sessions, in_flight)]
    return phases


def long_context(document: int = 130_816, question: int = 128, output: int = 128, seed: int = 108) -> Phases:
    """Generates two questions about one document, one after the other: 128k tokens with the answer.

    The first phase computes the document; the second finds it in the cache.
    """
    rng = random.Random(seed)
    text = _ids(rng, document)
    return [[(text + _ids(rng, question), output)] for _ in range(2)]


def _ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(10, VOCAB) for _ in range(n)]


def _around(rng: random.Random, n: int) -> int:
    """Returns a random length from half of ``n`` to one and a half."""
    return rng.randint(n // 2, n * 3 // 2)


def load_workloads(path: Path | None) -> Workloads:
    """Runs a Python file and returns its ``ALL``; None: returns that of this file."""
    if path is None:
        return ALL
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, f"{path} is not a Python file"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    workloads: Workloads = module.ALL
    return workloads


ALL: Workloads = {
    workload.__name__: workload
    for workload in (single, decode, unshared, fewshot, multiturn, agents, pressure, long_context)
}
