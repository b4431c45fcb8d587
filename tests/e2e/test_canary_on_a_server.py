"""A real server with ``--canary-interval``, whose KV is changed while it serves."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from support.live import HERE, serving, wait_for

CHECKS, FAILURES = (rf'canary_{name}_total{{tier="device"}}' for name in ("checks", "failures"))


@pytest.mark.nightly
def test_changed_pages_are_found_and_dropped(sensitive: Path, tmp_path: Path) -> None:
    entry = [
        sys.executable,
        str(HERE / "watched_cli.py"),
        str(tmp_path / "report"),
        str(HERE / "corrupting_runtime.py"),
    ]
    with serving(sensitive, tmp_path / "errors", "--canary-interval", "0.1", entry=entry) as server:
        before = server.canary()
        n_prompt = server.metric("prefix_cache_queries_total")
        wait_for(lambda: server.metric(CHECKS) >= 5, "the canary does not run")
        assert server.metrics(FAILURES, "prefix_cache_queries_total") == [0, n_prompt]
        assert server.metrics("time_to_first_token_seconds_count") == [1]
        assert server.http.get("/cache/doctor").json()["requests"] == 1
        os.kill(server.runtime_pid, signal.SIGUSR1)
        wait_for(lambda: server.metric(FAILURES) == 1, "the change is not found")
        server.http.post("/flush_cache")  # the pages of the prompt before were changed, too
        n_checks = server.metric(CHECKS)
        wait_for(lambda: server.metric(CHECKS) >= n_checks + 3, "the canary does not go on")
        assert server.metric(FAILURES) == 1
        assert server.canary() == before
        wait_for(server.is_idle, "pages or requests are left")
        errors = [line for line in (tmp_path / "errors").read_text().splitlines() if "error: the canary" in line]
        assert len(errors) == 1
        assert "of tier device" in errors[0]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait() == 0
