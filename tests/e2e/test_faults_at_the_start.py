"""What cannot be served ends before it is ready, with one line that says why, and leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.failed_start import reason_to_end


@pytest.fixture
def checkpoint(sensitive: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(sensitive, tmp_path / "model")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "t"
    folder.mkdir()
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
def test_a_spoilt_checkpoint(checkpoint: Path, scratch: Path, spoil: Callable[[Path], object], says: str) -> None:
    spoil(checkpoint)
    assert says in reason_to_end(scratch, str(checkpoint))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-total-tokens", "8"], "page"),
        (["--kv-cache-memory-bytes", str(1 << 50)], "kv_cache_memory_bytes"),
        (["--device", "cpu", "--gpu-memory-utilization", "0.5"], "gpu_memory_utilization"),
        (["--device", "cuda"], "set device to cpu"),
    ],
)
def test_settings_that_do_not_fit(checkpoint: Path, scratch: Path, flags: list[str], says: str) -> None:
    assert says in reason_to_end(scratch, str(checkpoint), *flags)
