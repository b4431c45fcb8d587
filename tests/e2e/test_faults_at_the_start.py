"""A failed start ends with one line that states the reason, and leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cases import rest_nightly
from support.failed_start import failed_start_error


@pytest.fixture
def checkpoint(sensitive: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint for a test to corrupt."""
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


def pipe(name: str) -> Callable[[Path], None]:
    """Replaces a file by a pipe that nobody writes to, so that reading it would never end."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def overwritten(name: str, content: bytes) -> Callable[[Path], int]:
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    rest_nightly(
        [
            (overwritten("config.json", b"{"), "config.json"),
            (truncated("model.safetensors", 1_000_000), "model.safetensors"),
            (pipe("config.json"), "config.json cannot be read: it is not a regular file"),
            (with_config(num_hidden_layers=5), "num_hidden_layers"),
            (overwritten("tokenizer.json", b'{"version": "1.0"}'), "tokenizer.json"),
            (pipe("tokenizer.json"), "tokenizer.json cannot be read: it is not a regular file"),
            (pipe("chat_template.jinja"), "chat_template.jinja cannot be read: it is not a regular file"),
        ],
        kept=(1,),
    ),
    ids=["config", "weights", "config pipe", "layers", "tokenizer", "tokenizer pipe", "template pipe"],
)
def test_a_corrupt_checkpoint_is_reported(
    checkpoint: Path, scratch: Path, corrupt: Callable[[Path], object], message: str
) -> None:
    corrupt(checkpoint)
    assert message in failed_start_error(scratch, str(checkpoint))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-cache-memory-bytes", str(1 << 50)], "kv_cache_memory_bytes"),
        (["--max-total-tokens", "8"], "page"),
        (["--device", "cuda"], "device to cpu"),
    ],
)
def test_settings_that_do_not_fit_are_reported(
    checkpoint: Path, scratch: Path, flags: list[str], message: str
) -> None:
    assert message in failed_start_error(scratch, str(checkpoint), *flags)
