"""What cannot be served ends before it is ready, with one line that says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from radixkv.checkpoints import resolve


@pytest.fixture
def checkpoint(cache: Path, tmp_path: Path) -> Path:
    """A copy of the embedded model."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in resolve("tiny", cache_folder=cache / "radixkv").folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def with_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def truncated(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def overwritten(name: str, content: bytes) -> Callable[[Path], int]:
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (overwritten("config.json", b"{"), "config.json"),
        (with_config(num_hidden_layers=5), "num_hidden_layers"),
        (truncated("model.safetensors", 1_000_000), "model.safetensors"),
        (overwritten("tokenizer.json", b'{"version": "1.0"}'), "tokenizer.json"),
    ],
    ids=["config", "layers", "weights", "tokenizer"],
)
def test_a_spoilt_checkpoint(checkpoint: Path, spoil: Callable[[Path], object], says: str) -> None:
    spoil(checkpoint)
    assert says in reason(str(checkpoint))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-total-tokens", "8"], "page"),
        (["--kv-cache-memory-bytes", str(1 << 50)], "kv_cache_memory_bytes"),
    ],
)
def test_sizes_that_do_not_fit(checkpoint: Path, flags: list[str], says: str) -> None:
    assert says in reason(str(checkpoint), *flags)


def reason(*flags: str) -> str:
    """The one line that the server ends with; it says its stages before."""
    ended = subprocess.run(
        [sys.executable, "-m", "radixkv.cli", "serve", *flags, "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    *stages, last = ended.stderr.splitlines()
    assert all(line.startswith("radixkv: ") for line in stages), ended.stderr
    assert last.startswith("radixkv serve: error: "), ended.stderr
    return last
