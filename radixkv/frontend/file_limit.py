"""The limit on the server's open files, and so on its connections."""

from __future__ import annotations

import resource
from contextlib import suppress

from radixkv.frontend.metrics.log import log_line

N_RESERVED_FILES = 64
"""Files that the server needs besides its clients' connections."""


def raise_file_limit(max_queued_requests: int, max_num_seqs: int | None) -> None:
    """Raises the soft limit of open files to the hard limit. Logs a line if it is below the queue's need.

    A client that connects beyond the limit is disconnected without a response, even without the full queue's 503.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a hard limit above what the system gives to any process
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_needed = max_queued_requests + (max_num_seqs or 0) + N_RESERVED_FILES
    if limit != resource.RLIM_INFINITY and limit < n_needed:
        log_line(
            f"this process may open {limit} files, but needs {n_needed} for a queue of max_queued_requests "
            f"{max_queued_requests}; clients beyond the limit are disconnected without a reply: "
            "raise the hard limit (ulimit -H -n), or give a lower --max-queued-requests"
        )
