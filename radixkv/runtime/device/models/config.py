"""``config.json`` of a checkpoint -> what the decoder is built from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.errors import CheckpointError

ARCHITECTURES = ("LlamaForCausalLM",)
"""The checkpoints that the decoder covers."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the slow rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class DecoderConfig:
    """The decoder's sizes and variants."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tied_head: bool
    """The output head is the embedding."""

    @classmethod
    def parse(cls, config: Mapping[str, Any], path: Path) -> DecoderConfig:
        """Reads what a ``config.json`` of Transformers 4 or 5 holds; ``path`` is the file, for messages.

        Raises:
            CheckpointError: a field is missing or wrong, or asks for what this decoder does not do.
        """
        fields = _Fields(config, path)
        architecture = _architecture(fields)
        _refuse_variants(fields)
        hidden_size = fields.count("hidden_size")
        n_heads = fields.count("num_attention_heads")
        n_kv_heads = fields.count("num_key_value_heads", n_heads)
        head_dim = fields.count("head_dim", hidden_size // n_heads)
        if n_heads % n_kv_heads:
            raise fields.error(
                f"num_attention_heads {n_heads} is not a multiple of num_key_value_heads {n_kv_heads}"
            )
        if head_dim % 2:
            raise fields.error(f"head_dim {head_dim} is odd; rotary embedding needs an even one")
        rope = _rope_fields(fields)
        return cls(
            architecture=architecture,
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.count("intermediate_size"),
            n_layers=fields.count("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=rope.number("rope_theta", 10_000.0),
            rope_scaling=_rope_scaling(rope),
            tied_head=bool(fields.get("tie_word_embeddings")),
        )


class _Fields:
    """Typed reads of a JSON object; None counts as absent."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self._values = values
        self._path = path

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {problem}")

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def part(self, values: Mapping[str, Any]) -> _Fields:
        """The fields of an object within this one."""
        return _Fields(values, self._path)

    def text(self, name: str, default: str) -> str:
        value = self._read(name, default)
        if not isinstance(value, str):
            raise self.error(f"{name} is {value!r}; it must be a string")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self._read(name, default)
        if type(value) is not int or value < 1:
            raise self.error(f"{name} is {value!r}; it must be a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._read(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.error(f"{name} is {value!r}; it must be a positive number")
        return float(value)

    def _read(self, name: str, default: object) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"it has no {name}")
        return value


def _architecture(fields: _Fields) -> str:
    named = fields.get("architectures")
    supported = ", ".join(ARCHITECTURES)
    if not isinstance(named, list) or len(named) != 1:
        raise fields.error(f"architectures is {named!r}; it must name one of {supported}")
    if named[0] not in ARCHITECTURES:
        raise fields.error(f"architecture {named[0]!r} is not supported; this release runs {supported}")
    return str(named[0])


def _refuse_variants(fields: _Fields) -> None:
    for name, plain in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("hidden_act", "silu"),
        ("quantization_config", None),
        ("partial_rotary_factor", 1.0),
        ("sliding_window", None),
    ):
        value = fields.get(name)
        if value is not None and value != plain:
            raise fields.error(f"{name} {value!r} is not supported in this release")


def _rope_fields(fields: _Fields) -> _Fields:
    """Transformers 5 keeps all of it in ``rope_parameters``, 4 in ``rope_theta`` and ``rope_scaling``."""
    values: dict[str, Any] = {"rope_theta": fields.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        part = fields.get(name)
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise fields.error(f"{name} is {part!r}; it must be an object")
        values.update(part)
    return fields.part(values)


def _rope_scaling(rope: _Fields) -> Llama3Scaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise rope.error(f"rope type {kind!r} is not supported; this release runs 'default' and 'llama3'")
    scaling = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=rope.count("original_max_position_embeddings"),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise rope.error(
            f"low_freq_factor {scaling.low_freq_factor} must be below high_freq_factor {scaling.high_freq_factor}"
        )
    return scaling
