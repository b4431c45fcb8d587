"""Tests with Codex, with the settings of docs/agents.md."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from codex_cli_bin import bundled_codex_path

SERVER, KEY = os.environ["SERVER"], os.environ["KEY"]
SETTINGS = f"""
model = "embedded"
model_provider = "radixkv"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.radixkv]
name = "radixkv"
base_url = "{SERVER}/v1"
env_key = "RADIXKV_API_KEY"
wire_api = "responses"
"""


def run(home: Path, *words: str) -> list[dict[str, Any]]:
    """Runs ``codex exec``; returns its events."""
    ended = subprocess.run(
        [bundled_codex_path(), "exec", *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=250,
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "RADIXKV_API_KEY": KEY, "NO_PROXY": "127.0.0.1"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def test_two_turns(tmp_path: Path) -> None:
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(SETTINGS)
    first = run(tmp_path, "--json", "--skip-git-repo-check", "What is 41 plus 11?")
    second = run(tmp_path, "resume", "--last", "--json", "--skip-git-repo-check", "What is 20 plus 30?")
    for events in (first, second):
        assert not [event for event in events if event["type"] in ("error", "turn.failed")], events
        (message,) = [
            event["item"]
            for event in events
            if event["type"] == "item.completed" and event["item"]["type"] == "agent_message"
        ]
        assert message["text"]
        (end,) = [event for event in events if event["type"] == "turn.completed"]
    n_prompt, n_cached = end["usage"]["input_tokens"], end["usage"]["cached_input_tokens"]
    assert n_cached > 0.4 * n_prompt, "the first turn is cached"
