"""The header of a safetensors file, checked against the file's size."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from radixkv.checkpoints.files import is_integer
from radixkv.errors import CheckpointError

_MAX_BYTES = 4_000_000
"""Of a header, which is parsed while nothing else runs. That of all modules of an 8B model has 60 KB."""
_MAX_NAME = 1024
"""Characters of a tensor's name, which is split at each of its dots, and repeated by errors."""
ITEM_BYTES = MappingProxyType({"F32": 4, "F16": 2, "BF16": 2})
"""Bytes of a value of each dtype that adapters may have, as safetensors names them."""


class Span(NamedTuple):
    """Where a tensor is in a file."""

    dtype: str
    """As safetensors names it: F32, F16 or BF16."""
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte from the end of the header."""
    end: int


def read_spans(file: BinaryIO, size: int, path: Path) -> tuple[bytes, Mapping[str, Span]]:
    """Reads the header of a safetensors file.

    Args:
        file: at its beginning.
        size: bytes of the file.
        path: of the file, for errors.

    Returns:
        The file's bytes up to the end of the header, and where each tensor is.

    Raises:
        CheckpointError: the header or a tensor's name is too long; the file is damaged: it is too short or too
            long, or tensors overlap or leave gaps; or a tensor's dtype is none of float32, float16 and bfloat16.
        OSError: the file cannot be read.
    """
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > size - 8:
        raise _damaged(path, f"it has {size} bytes, and its header does not end before")
    if length > _MAX_BYTES:
        raise CheckpointError(
            f"{path} has a header of {length} bytes; those of adapters may have {_MAX_BYTES}: check that it is one"
        )
    header = file.read(length)
    try:
        if not header.startswith(b"{"):
            raise ValueError("it begins with another character than {")
        entries = json.loads(header.decode(), object_pairs_hook=_unique)
        metadata = entries.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("a value of __metadata__ is no text")
        spans = {name: _span(name, entry, path) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"its header is invalid: {type(error).__name__}: {error}") from error
    in_order = sorted(spans.items(), key=lambda item: item[1][2:])
    for (one, span), (other, following) in pairwise(in_order):
        if span.end != following.begin:
            what = "overlap" if span.end > following.begin else "have a gap between them"
            raise _damaged(path, f"tensors {one} and {other} {what}")
    if in_order and in_order[0][1].begin != 0:
        raise _damaged(path, f"tensor {in_order[0][0]} does not begin where the header ends")
    n_bytes = in_order[-1][1].end if in_order else 0
    if (n_stored := size - 8 - length) != n_bytes:
        raise _damaged(path, f"its tensors take {n_bytes} bytes, but {n_stored} follow the header")
    return prefix + header, MappingProxyType(spans)


def _span(name: str, entry: Any, path: Path) -> Span:
    if len(name) > _MAX_NAME:
        raise CheckpointError(
            f"{path} has a tensor whose name has {len(name)} characters; those of adapters may have {_MAX_NAME}: "
            "check that it is one"
        )
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not all(is_integer(size) and size >= 0 for size in (*shape, begin, end)):
        raise ValueError(f"sizes or offsets of tensor {name} are not integers from 0 on")
    if dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"{path}: tensor {name} has dtype {dtype}; adapters must be {', '.join(ITEM_BYTES)}: convert it"
        )
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"tensor {name} of shape {shape} and dtype {dtype} has {end - begin} bytes")
    return Span(dtype, tuple(shape), begin, end)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of a JSON text; raises ``ValueError`` if a name occurs twice."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a complete safetensors file: {reason}; fetch the adapter again")
