"""Checkpoints of embedding models: architectures, and modules of sentence-transformers behind the decoder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixkv.checkpoints.files import read_object, read_text
from radixkv.errors import CheckpointError


def check_classifier(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ``CheckpointError`` if the architecture ends in a classifier, as converted rerankers do."""
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and name.endswith("ForSequenceClassification"):
            raise CheckpointError(
                f"{folder / 'config.json'}: architecture {name!r} is not supported: it has a classifier "
                "instead of an output head; use the original, such as Qwen/Qwen3-Reranker-0.6B, with --task score"
            )


def check_reranker(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ``CheckpointError`` for a model of which no reranker is known."""
    if (names := config.get("architectures")) != ["Qwen3ForCausalLM"]:
        raise CheckpointError(
            f"{folder / 'config.json'}: architectures is {names!r}; task score has the prompts of Qwen3-Reranker, "
            "a Qwen3ForCausalLM"
        )


def causal_config(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of an embedding model, under the name that its architecture has with a head.

    Raises:
        CheckpointError: its tokens attend to later ones.
    """
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise CheckpointError(
            f"{folder / 'config.json'}: its tokens attend to later ones (is_causal, use_bidirectional_attention), "
            "which is not supported; use a causal model, such as Qwen/Qwen3-Embedding-0.6B"
        )
    match config.get("architectures"):
        case [str(name)] if name.endswith("Model"):
            name = name.removesuffix("Model").removesuffix("Text")
            return config | {"architectures": [f"{name}ForCausalLM"]}
    return config


def read_normalizes(folder: Path) -> bool:
    """Returns whether embeddings get length 1: not if ``modules.json`` is there and lists no ``Normalize``.

    Raises:
        CheckpointError: the modules are others than a decoder, pooling of the last token and ``Normalize``.
    """
    path = folder / "modules.json"
    text = read_text(path)
    if text is None:
        return True
    try:
        modules = {str(one["type"]).rpartition(".")[2]: str(one["path"]) for one in json.loads(text)}
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path} is not a list of modules with their type and path; fetch the checkpoint again"
        ) from error
    others = modules.keys() - {"Transformer", "Pooling", "Normalize"}
    if others:
        raise CheckpointError(
            f"{path}: the modules {', '.join(sorted(others))} are not supported; this release has Transformer, "
            "Pooling and Normalize"
        )
    if (name := modules.get("Pooling")) is None:
        raise CheckpointError(f"{path} lists no Pooling; embeddings need one of the last token")
    _check_pooling(folder / Path(name).name / "config.json")
    return "Normalize" in modules


def _check_pooling(path: Path) -> None:
    fields = read_object(path)
    if fields is None:
        raise CheckpointError(f"{path} is missing, which modules.json names; fetch the checkpoint again")
    prefix = "pooling_mode_"
    modes = [
        name.removeprefix(prefix) for name, value in fields.items() if name.startswith(prefix) and value is True
    ]
    if isinstance(mode := fields.get("pooling_mode"), str):
        modes = [mode]
    if modes != ["lasttoken"]:
        raise CheckpointError(
            f"{path}: pooling {', '.join(modes) or 'mean_tokens'} is not supported; embeddings are the last "
            "token's state (lasttoken)"
        )
