"""A real server against its own ``/openapi.json``: Schemathesis draws valid and invalid requests from the document.

Each response must have a status, a media type and a JSON that the document names. None may be a 500 or 503, which
are documented for failures of the server.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from radixkv.checkpoints.embedded import embedded_folder
from support.live import serving
from support.paths import ROOT

PROGRAM = ROOT / ".venv" / "api" / "bin" / "schemathesis"
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "response_headers_conformance"),
    *("negative_data_rejection", "unsupported_method", "allow_header_conformance"),
)
FLAGS = ("--served-model-name", "tiny", "--max-total-tokens", "4096", "--max-model-len", "64")
"""Answers are short, because most requests have no limit of tokens."""
ENDLESS = "/cache/tree/events"
LIMIT_S = 1200


@pytest.mark.api
def test_responses_are_as_documented(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seed = request.config.getoption("--hypothesis-seed") or "1"
    with serving(embedded_folder(), tmp_path / "errors", *FLAGS) as live:
        command = [PROGRAM, "run", f"{live.base_url}/openapi.json", "--checks", ",".join(CHECKS), "--seed", seed]
        command += ["--phases", "coverage,fuzzing", "--max-examples", "20", "--exclude-path", ENDLESS, "--no-color"]
        command += ["--request-timeout", "60"]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        assert live.canary() == live.canary()
        assert live.is_idle()
