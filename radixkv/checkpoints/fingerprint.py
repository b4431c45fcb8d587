"""A fingerprint of a model, by which KV pages outside the process are found again."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from radixkv.checkpoints.files import read_header
from radixkv.errors import CheckpointError
from radixkv.settings.config import LoadFormat

SAMPLE_BYTES = 4096
MAX_PART_BYTES = 2**24
"""Each tensor has a sample, and a larger one has a sample of each part of up to this size."""
_N_THREADS = 16
"""Reads at once: on a network file system, each takes a millisecond."""


def fingerprint(folder: Path, load_format: LoadFormat, quantization: str | None = None) -> str:
    """Returns a digest of what the KV of a model's tokens depends on; another model has another one.

    Digests ``config.json``, and names, sizes and headers of the weight files with samples of every tensor: training
    may leave most tensors alone, but changes the others nearly everywhere. Dummy weights depend on ``config.json``
    only.

    Args:
        folder: the checkpoint's.
        load_format: whether the weights are those of the files.
        quantization: the format that the weights are rounded to, if any.

    Raises:
        CheckpointError: a file cannot be read.

    Cost: a read of 4 KiB for each tensor and each 16 MiB of it.
    """
    try:
        digest = sha256(f"{load_format} {quantization}\n".encode())
        digest.update(sha256((folder / "config.json").read_bytes()).digest())
        if load_format != "dummy":
            for path in sorted(folder.glob("*.safetensors")):
                digest.update(repr((path.name, path.stat().st_size)).encode())
                digest.update(_weights_digest(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} cannot be read: {type(error).__name__}: {error}; fetch the checkpoint again"
        ) from error
    return digest.hexdigest()


def _weights_digest(path: Path) -> bytes:
    """Returns a digest of a safetensors file's header and of samples of each tensor."""
    header = read_header(path)
    digest = sha256(header)
    offsets = [value["data_offsets"] for name, value in json.loads(header).items() if name != "__metadata__"]
    descriptor = os.open(path, os.O_RDONLY)
    try:

        def read(position: int) -> bytes:
            return os.pread(descriptor, SAMPLE_BYTES, 8 + len(header) + position)

        with ThreadPoolExecutor(_N_THREADS) as threads:
            for sample in threads.map(
                read, (position for begin, end in offsets for position in _samples(begin, end))
            ):
                digest.update(sample)
    finally:
        os.close(descriptor)
    return digest.digest()


def _samples(begin: int, end: int) -> list[int]:
    """Returns where to read samples of a tensor: in the middle of each of its equal parts."""
    n_parts = 1 + (end - begin) // MAX_PART_BYTES
    return [begin + (end - begin) * (2 * part + 1) // (2 * n_parts) for part in range(n_parts)]
