"""The devices that benches put in place of a real one have all that an executor has."""

from __future__ import annotations

import importlib
import inspect

import pytest

from radixkv.runtime.step.executor import Executor
from support.paths import ROOT

MEMBERS = {*Executor.__annotations__, *(name for name, _ in inspect.getmembers(Executor, inspect.isfunction))}


@pytest.fixture(autouse=True)
def bench_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")


def missing(device: object) -> set[str]:
    return {name for name in MEMBERS if not name.startswith("_") and not hasattr(device, name)}


def test_the_null_device() -> None:
    device = importlib.import_module("schedule").NullDevice(8, 1000)
    assert missing(device) <= {"open_copier"}, "it is used without tiers"


def test_the_device_of_recorded_answers() -> None:
    computing = importlib.import_module("schedule").NullDevice(8, 1000)
    assert missing(importlib.import_module("drafts").ReplayedExecutor(computing, {})) == set()
