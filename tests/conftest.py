"""Settings of all tests: a skipped test fails, unless it needs a GPU."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from radixkv import terminal_progress
from support.sensitive_checkpoint import save_sensitive


def pytest_configure(config: pytest.Config) -> None:
    # A shell makes background jobs ignore SIGINT, and servers under test would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.pluginmanager.hasplugin("hypothesispytest"):  # not installed for the GPU tests
        use_same_examples_everywhere()


def use_same_examples_everywhere() -> None:
    """Makes Hypothesis deterministic on all machines; ``--hypothesis-profile default`` tries other examples."""
    from hypothesis import HealthCheck, settings

    too_slow = [HealthCheck.too_slow]
    settings.register_profile(
        "same", derandomize=True, database=None, deadline=None, suppress_health_check=too_slow
    )
    settings.load_profile("same")


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
    monkeypatch.setattr(terminal_progress, "START_DELAY_S", threading.TIMEOUT_MAX)


@pytest.fixture(scope="session")
def sensitive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an untrained checkpoint whose answers depend on every KV page."""
    folder = tmp_path_factory.mktemp("sensitive")
    save_sensitive(folder)
    return folder
