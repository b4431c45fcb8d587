"""A checkpoint's ``generation_config.json``: end-of-sequence ids and default sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from radixkv.checkpoints.files import is_integer, read_object
from radixkv.errors import CheckpointError, InvalidRequest
from radixkv.wire.sampling import SamplingParams

_SAMPLING_FIELDS = MappingProxyType(
    {
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "max_new_tokens": "max_tokens",
    }
)
"""Keys of the file that set sampling defaults, and the corresponding fields of ``SamplingParams``."""


def read_generation_config(
    folder: Path, config: Mapping[str, Any]
) -> tuple[frozenset[int], Mapping[str, float | int]]:
    """Returns the end-of-sequence ids and the default sampling of a checkpoint.

    ``generation_config.json`` is optional; its ids join those of ``config.json``.

    Raises:
        CheckpointError: a value is invalid; the error names the file and the key.
    """
    path = folder / "generation_config.json"
    values = read_object(path) or {}
    eos_token_ids = _token_ids(values, path) | _token_ids(config, folder / "config.json")
    return eos_token_ids, _default_sampling(values, path)


def _token_ids(values: Mapping[str, Any], path: Path) -> frozenset[int]:
    value = values.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(is_integer(token) and token >= 0 for token in ids):
        raise CheckpointError(f"{path}: eos_token_id is {value!r}; it must be a token id or a list of them")
    return frozenset(ids)


def _default_sampling(values: Mapping[str, Any], path: Path) -> Mapping[str, float | int]:
    defaults = {key: values[key] for key in _SAMPLING_FIELDS if values.get(key) is not None}
    for key, value in defaults.items():
        try:
            SamplingParams(**{_SAMPLING_FIELDS[key]: value})
        except InvalidRequest as error:
            raise CheckpointError(f"{path}: {key}: {error}; correct the file or remove the key") from error
    return MappingProxyType(defaults)
