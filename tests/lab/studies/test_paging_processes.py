"""The processes that the paging study runs in: the same results in the same order, and none that stays behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from operator import call
from typing import Any

import pytest

from radixkv.lab.studies.paging.lengths import published_lengths
from radixkv.lab.studies.paging.processes import Map, NotSent, ProcessDied, worker_processes
from radixkv.lab.studies.paging.schemes import Granule
from radixkv.lab.studies.paging.study import StudySettings, compare_page_sizes, compare_schemes
from support.cases import rest_nightly
from support.processes import has_ended

LIFETIME_S = 90
"""How long work takes that nobody waits for."""

LONG_WORK = f"""
import multiprocessing, sys, time
from radixkv.lab.studies.paging.processes import worker_processes
try:
    with worker_processes(2) as map_items:
        results = map_items(time.sleep, [{LIFETIME_S}] * 4)
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        list(results)
except KeyboardInterrupt:
    sys.exit(130)
"""

INTERRUPTED_WORK = """
import operator, signal
from functools import partial
from radixkv.lab.studies.paging.processes import worker_processes
with worker_processes(2) as map_items:
    print(list(map_items(operator.call, [partial(signal.raise_signal, signal.SIGINT)] * 4)))
"""


def study(*workloads: str, n_conversations: int = 20) -> StudySettings:
    return StudySettings(
        published_lengths(),
        workloads=workloads,
        schemes=("reserve-maximum", "vattention-shared", "radix"),
        page_size=16,
        granules=(Granule(1 << 16), Granule(1 << 21)),
        page_sizes=(1, 16, 64),
        pool_tokens=2048,
        max_model_len=512,
        n_conversations=n_conversations,
    )


def lines(settings: StudySettings, map_items: Map) -> list[dict[str, Any]]:
    """Returns all lines without the host time, which differs between any two runs."""
    by_scheme, by_page_size = compare_schemes(settings, map_items), compare_page_sizes(settings, map_items)
    return [line | {"host_us_per_token": line["host_us_per_token"] is None} for line in (*by_scheme, *by_page_size)]


def started(script: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Starts a script in a session of its own; returns it, and the process ids that its first line has."""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.nightly
def test_two_processes_give_the_lines_of_one_in_their_order() -> None:
    settings = study("multi-turn", "uniform-short", n_conversations=17)
    expected = lines(settings, map)
    assert [line["page_size"] for line in expected if line["workload"] == "uniform-short"][-2:] == [16, 64], (
        "memory never runs out with pages of 1 token"
    )
    with worker_processes(2) as map_items:
        got = lines(settings, map_items)
    assert json.dumps(got) == json.dumps(expected), "the fields have the same order too"


def test_results_come_in_order_from_no_more_processes_than_asked_for() -> None:
    with worker_processes(2) as map_items:
        slow_first = map_items(call, [partial(time.sleep, 0.3), *[partial(os.getpid)] * 20])
        of_another_call = map_items(abs, range(-3, 0))
        assert list(of_another_call) == [3, 2, 1]
        assert next(slow_first) is None
        pids = set(slow_first)
        assert pids <= {child.pid for child in multiprocessing.active_children()}
        assert len(pids) in (1, 2)
    assert not multiprocessing.active_children()


def test_an_error_comes_in_place_of_its_result_and_ends_work_that_goes_on() -> None:
    with worker_processes(2) as map_items:
        results = map_items(call, [partial(int, "1"), partial(int, "x"), partial(time.sleep, LIFETIME_S)])
        assert next(results) == 1
        with pytest.raises(ValueError, match="'x'") as caught:
            next(results)
    assert "Traceback" in caught.value.__notes__[0], "where in the process it was raised"
    assert not multiprocessing.active_children()


class TwoPartError(Exception):
    """Cannot be read from its pickled form, because that has one argument."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def fail_in_two_parts() -> None:
    raise TwoPartError("salt", "pepper")


@pytest.mark.parametrize(
    ("work", "message"),
    rest_nightly([(fail_in_two_parts, "salt pepper"), (threading.Lock, "lock cannot be sent")], kept=(1,)),
)
def test_what_cannot_be_sent_is_named(work: Callable[[], object], message: str) -> None:
    with worker_processes(2) as map_items, pytest.raises(NotSent, match=message):
        list(map_items(call, [work, work]))


@pytest.mark.parametrize(
    ("end", "message"),
    [(partial(os._exit, 3), "exit code 3"), (partial(signal.raise_signal, signal.SIGKILL), "taskset -c 0")],
)
def test_a_process_that_dies_ends_the_work(end: partial[None], message: str) -> None:
    with worker_processes(2) as map_items, pytest.raises(ProcessDied, match=message):
        list(map_items(call, [partial(time.sleep, LIFETIME_S), end]))
    assert not multiprocessing.active_children()


def test_ctrl_c_is_left_to_the_process_that_started_the_others() -> None:
    command = [sys.executable, "-c", INTERRUPTED_WORK]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{[None] * 4}\n"


def test_ctrl_c_ends_all_processes_without_a_word_of_theirs() -> None:
    process, pids = started(LONG_WORK)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does; the processes have hardly begun
    _, errors = process.communicate()
    assert (process.returncode, errors) == (130, "")
    assert len(pids) == 2
    assert all(has_ended(pid) for pid in pids)


def test_no_process_outlives_a_command_that_is_killed() -> None:
    process, pids = started(LONG_WORK)
    process.kill()
    process.communicate()
    assert len(pids) == 2
    assert all(has_ended(pid) for pid in pids)
