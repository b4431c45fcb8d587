"""The workloads of engine comparisons are the same as when other engines were measured."""

import hashlib
import importlib
import json

import pytest

from support.cases import nightly_but
from support.paths import ROOT

BENCH = ROOT / "bench"
DIGESTS = {
    "single": "2986f9e8f6c5aa33",
    "decode": "8bc90261a6232c7b",
    "unshared": "7c6a2ca15cbd2cc9",
    "fewshot": "4f267c55e97f5462",
    "multiturn": "4a2c0bb988200ca3",
    "agents": "613422df67c318a9",
    "pressure": "703fd9abd4d60b3a",
    "long_context": "92ecbc939b30fd75",
}


@pytest.fixture
def workloads(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("token_workloads").ALL


@pytest.mark.parametrize("name", nightly_but(DIGESTS, "decode", "unshared"))
def test_the_token_ids_have_not_changed(workloads, name):
    phases = json.dumps(workloads[name]())
    assert hashlib.sha256(phases.encode()).hexdigest()[:16] == DIGESTS[name]


def test_no_workload_is_unpinned(workloads):
    assert list(workloads) == list(DIGESTS)


def test_questions_about_a_long_document_fill_a_context_of_128k_tokens(workloads):
    (((first, n_first),), ((second, n_second),)) = workloads["long_context"]()
    assert len(first) + n_first == len(second) + n_second == 128 * 1024
    assert first[:130_816] == second[:130_816]
    assert first != second


def test_a_chat_of_pressure_returns_when_the_pool_has_forgotten_it(workloads):
    pool, last = 131_072, {}
    n_tokens = 0
    for phase in workloads["pressure"]():
        assert len(phase) <= 32
        for prompt, n_new in phase:
            chat = tuple(prompt[:16])
            if chat in last:
                before, computed = last[chat]
                assert prompt[: len(before)] == before
                assert n_tokens - computed > 2 * pool
            n_tokens += len(prompt) + n_new
            last[chat] = prompt, n_tokens
    assert len(last) == 160
    assert 3.5 * pool < sum(len(prompt) + 64 for prompt, _ in last.values()) < 4 * pool
