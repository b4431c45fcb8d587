"""The end of the thread that compiles grammars."""

from __future__ import annotations

import gc
import logging
import threading

import pytest

from radixkv.runtime.structured.compile_jobs import CompileJobs, Job
from radixkv.runtime.structured.messages import TrialLimits
from radixkv.runtime.structured.vocabulary import Vocabulary
from radixkv.wire.structured_outputs import StructuredOutputs

JOB = Job("", StructuredOutputs(json_object=True))


def fail_while_a_job_comes() -> None:
    """Lets the thread end with a failure, and submits a job when it closes its event loop."""
    may_end = threading.Event()

    def read_vocabulary() -> Vocabulary:
        may_end.wait()
        raise OSError("there is none")

    jobs = CompileJobs(read_vocabulary, TrialLimits(1 << 20, 1 << 20, 1), 1.0)
    shut_down = jobs._loop.shutdown_asyncgens

    async def submit_and_shut_down() -> None:
        jobs.submit(JOB)
        await shut_down()

    jobs._loop.shutdown_asyncgens = submit_and_shut_down  # type: ignore[method-assign]
    may_end.set()
    with pytest.raises(OSError, match="there is none"):
        jobs.wait_until_ready()
    jobs._thread.join()
    jobs.submit(JOB)
    jobs.close()


def test_what_is_submitted_while_the_thread_ends_leaves_no_task_behind(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "asyncio"):
        fail_while_a_job_comes()
        gc.collect()
    assert [record.message for record in caplog.records] == []
