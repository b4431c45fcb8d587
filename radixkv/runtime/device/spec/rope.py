"""Rotary embedding's frequencies, and how checkpoints stretch them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radixkv.runtime.device.spec.config_reader import Fields

_MAX_THETA = 1e15
_MAX_FACTOR = 1e6
"""Beyond these and their inverses float32 has no angles; no model comes near."""


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by ``factor``."""

    factor: float

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """[head_dim / 2] -> the same."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the slow rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """Slow ones by ``factor``, fast ones not at all, those between smoothly: [head_dim / 2] -> the same."""
        wavelengths = 2 * math.pi / frequencies
        low = self.original_max_position / self.low_freq_factor
        high = self.original_max_position / self.high_freq_factor
        smooth = (self.original_max_position / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - smooth) * frequencies / self.factor + smooth * frequencies
        stretched = torch.where(wavelengths > low, frequencies / self.factor, between)
        return torch.where(wavelengths < high, frequencies, stretched)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: slow frequencies divided by ``factor``, fast ones kept, a ramp between; scores scaled besides."""

    factor: float
    beta_fast: float
    """Turns over the original length from which on a frequency is kept."""
    beta_slow: float
    """Turns over the original length up to which a frequency is divided."""
    original_max_position: int
    truncate: bool
    """Whether the ramp's ends are whole dimensions."""
    amplitude: float
    """Factor of cosine and sine."""

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """[head_dim / 2] -> the same."""
        size = 2 * len(frequencies)
        low, high = (self._dimension(turns, size, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(len(frequencies)).float() - low) / (high - low)).clamp(0, 1)
        return frequencies / self.factor * ramp + frequencies * (1 - ramp)

    def _dimension(self, turns: float, size: int, theta: float) -> float:
        """The dimension that makes so many turns over the original length."""
        length = self.original_max_position / (turns * 2 * math.pi)
        return size * math.log(length) / (2 * math.log(theta))


@dataclass(frozen=True)
class Rope:
    """Rotary embedding's settings."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None

    @classmethod
    def parse(cls, fields: Fields, default_theta: float) -> Rope:
        """Reads the settings of Transformers 4 or 5 from the fields of a ``config.json``.

        Raises:
            CheckpointError: a field is missing or wrong, or asks for what is not built.
        """
        rope = _merged(fields)
        theta = _number(rope, "rope_theta", default_theta, most=_MAX_THETA)
        return cls(theta, _scaling(rope, fields, theta))

    @property
    def amplitude(self) -> float:
        """Factor of cosine and sine."""
        return self.scaling.amplitude if isinstance(self.scaling, YarnScaling) else 1.0

    def frequencies(self, head_dim: int) -> Tensor:
        """Angle a position, float32: [head_dim / 2]."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / self.theta**exponents
        return frequencies if self.scaling is None else self.scaling.stretch(frequencies, self.theta)


def _merged(fields: Fields) -> Fields:
    """Transformers 5 keeps all of it in ``rope_parameters``, 4 in ``rope_theta`` and ``rope_scaling``."""
    values: dict[str, Any] = {"rope_theta": fields.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        part = fields.get(name)
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise fields.error(f"{name} is {part!r}; it must be an object")
        if nested := [key for key, value in part.items() if isinstance(value, Mapping)]:
            raise fields.error(f"{name} differs by kind of layer ({', '.join(nested)}), which is not supported")
        values.update(part)
    return fields.part(values)


def _scaling(rope: Fields, fields: Fields, theta: float) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    rope.refuse(partial_rotary_factor=1.0)
    match kind := rope.text("rope_type", rope.text("type", "default")):
        case "default":
            return None
        case "linear":
            return LinearScaling(_number(rope, "factor"))
        case "llama3":
            return _llama3(rope)
        case "yarn":
            return _yarn(rope, fields, theta)
    raise rope.error(
        f"rope type {kind!r} is not supported; this release runs 'default', 'linear', 'llama3' and 'yarn'"
    )


def _number(rope: Fields, name: str, default: float | None = None, *, most: float = _MAX_FACTOR) -> float:
    value = rope.number(name, default)
    if not 1.0 / most <= value <= most:
        raise rope.error(f"{name} is {value!r}; it must be between {1.0 / most:g} and {most:g}")
    return value


def _llama3(rope: Fields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_max_position=rope.count("original_max_position_embeddings"),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise rope.error(
            f"low_freq_factor {scaling.low_freq_factor} must be below high_freq_factor {scaling.high_freq_factor}"
        )
    return scaling


def _yarn(rope: Fields, fields: Fields, theta: float) -> YarnScaling:
    rope.refuse(mscale=None, mscale_all_dim=None)
    if theta <= 1:
        raise rope.error(f"rope_theta is {theta}; rope type 'yarn' needs it above 1")
    factor = _number(rope, "factor")
    # As in Transformers: without the original length, the stretched one.
    length = "original_max_position_embeddings"
    return YarnScaling(
        factor=factor,
        beta_fast=_number(rope, "beta_fast", 32.0),
        beta_slow=_number(rope, "beta_slow", 1.0),
        original_max_position=rope.count(length, fields.get("max_position_embeddings")),
        truncate=rope.flag("truncate", default=True),
        amplitude=_number(rope, "attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
    )
