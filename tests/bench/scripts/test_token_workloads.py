"""The workloads of engine comparisons are the same as when other engines were measured."""

import hashlib
import importlib
import json

import pytest

from support.paths import ROOT

BENCH = ROOT / "bench"
DIGESTS = {
    "single": "2986f9e8f6c5aa33",
    "decode": "8bc90261a6232c7b",
    "unshared": "7c6a2ca15cbd2cc9",
    "fewshot": "4f267c55e97f5462",
    "multiturn": "4a2c0bb988200ca3",
    "agents": "613422df67c318a9",
}


@pytest.fixture
def workloads(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("token_workloads").ALL


@pytest.mark.parametrize("name", DIGESTS)
def test_the_token_ids_have_not_changed(workloads, name):
    phases = json.dumps(workloads[name]())
    assert hashlib.sha256(phases.encode()).hexdigest()[:16] == DIGESTS[name]


def test_no_workload_is_unpinned(workloads):
    assert list(workloads) == list(DIGESTS)
