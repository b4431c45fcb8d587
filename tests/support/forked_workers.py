"""``--forks N``: N processes run the tests that one has collected, each a file at a time.

pytest-xdist collects all tests in each of its processes, and tells three reports of every test: a tenth of the time
that the tests of this repository take. Here processes are forked once all is collected, and of a test that passes
only its call is reported.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import traceback
from collections.abc import Iterator
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest
from _pytest._io import TerminalWriter

_NUMBER = struct.Struct("<i")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--forks", type=int, default=0, metavar="N", help="processes that are forked to run the collected tests"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    n_forks = session.config.getoption("--forks")
    if not n_forks or session.config.option.collectonly or session.testsfailed:
        return None
    _Parent(session).run(n_forks)
    return True


class _Files:
    """The tests by file, which processes take from one pipe in their order."""

    def __init__(self, items: list[pytest.Item]) -> None:
        self._files = [list(tests) for _, tests in groupby(enumerate(items), key=lambda test: test[1].path)]
        self._numbers, end = os.pipe()
        with open(end, "wb") as numbers:
            numbers.write(b"".join(map(_NUMBER.pack, range(len(self._files)))))

    def take(self) -> Iterator[tuple[int, pytest.Item]]:
        """Yields tests and their numbers until all files are taken."""
        while number := os.read(self._numbers, _NUMBER.size):
            yield from self._files[_NUMBER.unpack(number)[0]]

    def drop(self) -> None:
        """Lets no process take another file."""
        while os.read(self._numbers, mmap.PAGESIZE):
            pass


class _Parent:
    """Forks processes, and reports what they tell as if it had run the tests itself."""

    def __init__(self, session: pytest.Session) -> None:
        self._session, self._config = session, session.config
        self._files = _Files(session.items)
        self._pids: dict[Connection, int] = {}
        self._running: dict[Connection, mmap.mmap] = {}
        """The number of the test that a process runs; -1: none."""

    def run(self, n_forks: int) -> None:
        for index in range(n_forks):
            self._fork(index)
        try:
            while self._pids:
                for connection in wait([*self._pids]):
                    assert isinstance(connection, Connection)
                    self._hear(connection)
        finally:
            self._files.drop()
            for pid in self._pids.values():
                os.waitpid(pid, 0)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)

    def _fork(self, index: int) -> None:
        folder = self._config._tmp_path_factory.getbasetemp() / f"fork{index}"
        folder.mkdir()
        reports, ours = Pipe(duplex=False)
        running = mmap.mmap(-1, _NUMBER.size)
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            ours.close()
            self._pids[reports], self._running[reports] = pid, running
            return
        try:
            self._config._tmp_path_factory._basetemp = folder
            _Fork(self._session, ours, running).run(self._files)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _hear(self, connection: Connection) -> None:
        try:
            data = connection.recv()
        except EOFError:
            self._end(connection)
            return
        report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
        self._config.hook.pytest_runtest_logreport(report=report)
        if self._session.shouldfail:
            self._files.drop()

    def _end(self, connection: Connection) -> None:
        """Takes the end of a process, which fails the test that it has not ended."""
        code = os.waitstatus_to_exitcode(os.waitpid(self._pids.pop(connection), 0)[1])
        (number,) = _NUMBER.unpack(self._running.pop(connection)[:])
        if code == 0:
            return
        item = self._session.items[number]
        text = f"the process that ran it ended with {code}, and tests of its file have not run"
        failed = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        self._config.hook.pytest_runtest_logreport(report=failed)


class _Fork:
    """Runs tests in a process of its own, and tells its parent their reports."""

    def __init__(self, session: pytest.Session, parent: Connection, running: mmap.mmap) -> None:
        self._session, self._parent, self._running = session, parent, running

    def run(self, files: _Files) -> None:
        plugins = self._session.config.pluginmanager
        plugins.getplugin("terminalreporter")._tw = TerminalWriter(open(os.devnull, "w"))  # noqa: SIM115
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # into files that all forks share
        capture.start_global_capturing()
        plugins.register(self)
        tests = files.take()
        test = next(tests, None)
        while test is not None and not self._session.shouldfail:
            number, item = test
            test = next(tests, None)
            _NUMBER.pack_into(self._running, 0, number)
            self._session.config.hook.pytest_runtest_protocol(item=item, nextitem=test and test[1])
        self._session._setupstate.teardown_exact(None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        config = self._session.config
        data: dict[str, Any] = config.hook.pytest_report_to_serializable(config=config, report=report)
        try:
            self._parent.send(data)
        except OSError:
            os._exit(1)  # the parent has been killed
