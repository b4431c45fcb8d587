"""Rules for all tests: none is skipped, except those for a GPU where there is none."""

from __future__ import annotations

import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from support.sensitive_checkpoint import save_sensitive


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts a job in the background has it ignore SIGINT, which servers under test would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.pluginmanager.hasplugin("hypothesispytest"):  # tests for a GPU run without it
        same_examples_on_every_machine()


def same_examples_on_every_machine() -> None:
    """However slow it is. ``--hypothesis-profile default`` tries others."""
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


@pytest.fixture(scope="session")
def sensitive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint whose answers depend on every page, and on nothing that was trained."""
    folder = tmp_path_factory.mktemp("sensitive")
    save_sensitive(folder)
    return folder
