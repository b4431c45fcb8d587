"""How many files, and so connections, the server may have open at once."""

from __future__ import annotations

import resource
from contextlib import suppress

from radixkv.config import SchedulerConfig
from radixkv.frontend.metrics.log import say

N_OWN_FILES = 64
"""Room for what the server has open beside its clients' connections."""


def raise_file_limit(scheduler: SchedulerConfig) -> None:
    """Lets this process open as many files as it may. Says so if not all who may wait can be connected.

    Who connects when no more files can be opened is disconnected without a reply, also without the queue's 503.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a hard limit above what the system gives to any process
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_needed = scheduler.max_queued_requests + (scheduler.max_num_seqs or 0) + N_OWN_FILES
    if most != resource.RLIM_INFINITY and most < n_needed:
        say(
            f"this process may open {most} files, but {n_needed} are needed if max_queued_requests "
            f"{scheduler.max_queued_requests} are to wait; who connects beyond that is disconnected without a "
            "reply: raise the hard limit (ulimit -H -n), or give a lower --max-queued-requests"
        )
