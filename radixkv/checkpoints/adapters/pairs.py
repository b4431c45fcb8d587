"""Pairs of an adapter's matrices, checked against its configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from radixkv.checkpoints.adapters.config import PeftConfig
from radixkv.checkpoints.adapters.header import Span
from radixkv.errors import CheckpointError
from radixkv.settings.checks import MAX_LORA_RANK

_HALF = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
"""Names of tensors; older releases of PEFT kept the name of the adapter, ``default``."""
_OTHER_TENSORS = (
    ("lora_magnitude_vector", "DoRA's magnitudes"),
    ("lora_embedding_", "an adapted embedding"),
    (".bias", "a bias"),
    ("embed_tokens.", "an embedding"),
    ("lm_head.", "an output head"),
)
"""Parts of names, and what such tensors are."""


class LoraShape(NamedTuple):
    """An adapted module: its output gains ``scale * (B @ (A @ x))``."""

    rank: int
    n_in: int
    n_out: int
    scale: float


class Pair(NamedTuple):
    """Where the two matrices of a module are: A [rank, in] and B [out, rank]."""

    a: Span
    b: Span

    @property
    def rank(self) -> int:
        """Rows of A, which are the columns of B."""
        return self.a.shape[0]


def find_pairs(spans: Mapping[str, Span], path: Path) -> Mapping[str, Pair]:
    """Returns the pairs by module, as the model that the adapter was trained with names it.

    Args:
        spans: of all tensors.
        path: of their file, for errors.

    Raises:
        CheckpointError: there is no pair, a pair lacks a half, its shapes do not fit, or there is another tensor.
    """
    halves: dict[str, dict[str, Span]] = {}
    for name, span in spans.items():
        match = _HALF.fullmatch(name)
        if match is None:
            kind = next((kind for part, kind in _OTHER_TENSORS if part in name), "something else")
            raise CheckpointError(
                f"{path}: tensor {name} is {kind}, not base_model.model.<module>.lora_A.weight or lora_B.weight; "
                "this release serves LoRA of linear modules: train without it, or merge the adapter into its base"
            )
        if match["half"] in (stored := halves.setdefault(match["module"], {})):
            raise CheckpointError(
                f"{path}: module {match['module']} has lora_{match['half']} twice, with and without the adapter's "
                "name default; save the adapter again"
            )
        stored[match["half"]] = span
    if not halves:
        raise CheckpointError(f"{path} has no tensors; save the adapter again")
    return MappingProxyType({module: _pair(module, stored, path) for module, stored in halves.items()})


def _pair(module: str, halves: Mapping[str, Span], path: Path) -> Pair:
    if missing := {"A", "B"} - halves.keys():
        raise CheckpointError(f"{path}: module {module} has no lora_{missing.pop()}; save the adapter again")
    pair = Pair(halves["A"], halves["B"])
    if any(len(span.shape) != 2 or 0 in span.shape for span in pair) or pair.rank != pair.b.shape[1]:
        raise CheckpointError(
            f"{path}: module {module} has lora_A of shape {list(pair.a.shape)} and lora_B of shape "
            f"{list(pair.b.shape)}; they must be [rank, in] and [out, rank]: save the adapter again"
        )
    return pair


def shapes_of(pairs: Mapping[str, Pair], config: PeftConfig, *, max_rank: int) -> Mapping[str, LoraShape]:
    """Returns the shape of each pair.

    Args:
        pairs: by module.
        config: the adapter's.
        max_rank: the highest rank to serve.

    Raises:
        CheckpointError: a pattern of the configuration cannot be matched; a pair has another rank than the
            configuration says or a higher one than can be served; or the configuration does not name its module.
    """
    shapes = {}
    modules = config.modules(pairs)
    for module, pair in pairs.items():
        is_adapted, rank, scale = modules[module]
        if not is_adapted:
            raise CheckpointError(
                f"{config.path}: its target_modules, exclude_modules and layers_to_transform leave out {module}, "
                "of which the adapter has tensors; save the adapter again"
            )
        if pair.rank != rank:
            raise CheckpointError(
                f"{config.path}: r and rank_pattern give {module} rank {rank}, but its tensors have rank "
                f"{pair.rank}; save the adapter again"
            )
        if pair.rank > MAX_LORA_RANK:
            raise CheckpointError(
                f"{config.path}: {module} has rank {pair.rank}; this release serves ranks to {MAX_LORA_RANK}: "
                "merge the adapter into its base, or train one of a lower rank"
            )
        if pair.rank > max_rank:
            raise CheckpointError(
                f"{config.path}: {module} has rank {pair.rank}, above the limit of {max_rank}; "
                "raise --max-lora-rank"
            )
        shapes[module] = LoraShape(pair.rank, pair.a.shape[1], pair.b.shape[0], scale)
    return MappingProxyType(shapes)
