"""Settings of all tests: a skipped test fails, unless it needs a GPU."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Generator, Hashable
from pathlib import Path

import pytest

from radixkv import terminal
from support import forked_workers
from support.sensitive_checkpoint import save_sensitive


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.register(forked_workers)


def pytest_configure(config: pytest.Config) -> None:
    # A shell makes background jobs ignore SIGINT, and servers under test would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # until all is collected: full collections of modules and tests find nothing
    if config.pluginmanager.hasplugin("hypothesispytest"):  # not installed for the GPU tests
        set_numbers_of_examples(config.getoption("--hypothesis-profile"))


def pytest_collection_finish() -> None:
    """Freezes the modules and tests, which each full collection would otherwise look at for 0.4 s."""
    gc.collect()
    gc.freeze()
    gc.enable()


def set_numbers_of_examples(profile: str | None) -> None:
    """Loads one of two profiles of Hypothesis; ``support.cases.examples`` multiplies by their numbers of examples.

    "same" is the default: few examples, the same ones on all machines. "nightly" has more, drawn from
    ``--hypothesis-seed``.
    """
    from hypothesis import HealthCheck, settings

    everywhere = settings(database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("same", everywhere, derandomize=True, max_examples=3)
    settings.register_profile("nightly", everywhere, max_examples=100)
    settings.load_profile(profile or "same")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and item.get_closest_marker("gpu") is None:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped; only tests marked gpu may be"
    return report


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in the tests' own process show no progress, which depends on time."""
    monkeypatch.setattr(terminal, "START_DELAY_S", threading.TIMEOUT_MAX)


@pytest.fixture(scope="session")
def tried_tiles() -> dict[Hashable, tuple[int, ...]]:
    """The tiles of products that CPU devices have tried in this process, by what they depend on."""
    return {}


@pytest.fixture(scope="session")
def sensitive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an untrained checkpoint whose answers depend on every KV page."""
    folder = tmp_path_factory.mktemp("sensitive")
    save_sensitive(folder)
    return folder
