"""Rules for all tests: none is skipped, except those for a GPU where there is none."""

from __future__ import annotations

import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from support.sensitive_checkpoint import save_sensitive


def pytest_configure() -> None:
    """A shell that starts a job in the background has it ignore SIGINT, which servers under test would inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
