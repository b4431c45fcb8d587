"""Frequencies of the rotary embedding, with the context-extension methods of the supported checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radixkv.runtime.device.model_config.config_reader import ConfigReader

_MAX_THETA = 1e15
_MAX_FACTOR = 1e6
"""Upper bounds of theta and of scaling factors; their inverses are the lower bounds. Values beyond them overflow or
underflow float32 angles; no real model comes near."""


@dataclass(frozen=True)
class LinearScaling:
    """Linear position interpolation: divides all frequencies by ``factor``."""

    factor: float

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """Returns the stretched frequencies: [head_dim / 2] -> [head_dim / 2]."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling, which stretches only the slow rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """Divides slow frequencies by ``factor``, leaves fast ones and interpolates between.

        [head_dim / 2] -> [head_dim / 2].
        """
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
    """YaRN: divides slow frequencies by ``factor``, leaves fast ones, ramps between them and scales the scores."""

    factor: float
    beta_fast: float
    """Minimum rotations over the original context length for a frequency to stay unchanged."""
    beta_slow: float
    """Maximum rotations over the original context length for a frequency to be divided by ``factor``."""
    original_max_position: int
    truncate: bool
    """Whether the ends of the ramp are rounded outwards to whole dimensions."""
    amplitude: float
    """Multiplier of cosine and sine."""

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """Returns the stretched frequencies: [head_dim / 2] -> [head_dim / 2]."""
        size = 2 * len(frequencies)
        low, high = (self._dimension(rotations, size, theta) for rotations in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(len(frequencies)).float() - low) / (high - low)).clamp(0, 1)
        return frequencies / self.factor * ramp + frequencies * (1 - ramp)

    def _dimension(self, rotations: float, size: int, theta: float) -> float:
        """Returns the dimension that makes ``rotations`` full turns over the original context length."""
        length = self.original_max_position / (rotations * 2 * math.pi)
        return size * math.log(length) / (2 * math.log(theta))


@dataclass(frozen=True)
class ProportionalScaling:
    """Rotates the fastest part of the frequencies, divided by ``factor``, and leaves the other dimensions alone.

    Frequencies are those of a head that is rotated whole, unlike those of heads whose leading dimensions are.
    """

    part: float
    factor: float

    def stretch(self, frequencies: Tensor, theta: float) -> Tensor:
        """Returns the frequencies with zeros for what is not rotated: [head_dim / 2] -> [head_dim / 2]."""
        n_rotated = int(self.part * 2 * len(frequencies) // 2)
        return torch.where(torch.arange(len(frequencies)) < n_rotated, frequencies / self.factor, 0.0)


Scaling = LinearScaling | Llama3Scaling | ProportionalScaling | YarnScaling


@dataclass(frozen=True)
class Rope:
    """Settings of the rotary embedding."""

    theta: float
    scaling: Scaling | None = None

    @classmethod
    def parse(cls, fields: ConfigReader, default_theta: float) -> Rope:
        """Reads the settings of Transformers 4 or 5 from the fields of a ``config.json``.

        Raises:
            CheckpointError: a field is missing, invalid or not supported.
        """
        rope = _rope_fields(fields)
        theta = _number(rope, "rope_theta", default_theta, maximum=_MAX_THETA)
        return cls(theta, _scaling(rope, fields, theta))

    @property
    def amplitude(self) -> float:
        """Multiplier of cosine and sine."""
        return self.scaling.amplitude if isinstance(self.scaling, YarnScaling) else 1.0

    def frequencies(self, head_dim: int) -> Tensor:
        """Returns the angle per position, [head_dim / 2] float32."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / self.theta**exponents
        return frequencies if self.scaling is None else self.scaling.stretch(frequencies, self.theta)

    def cosine_sine(self, head_dim: int, n_positions: int) -> tuple[Tensor, Tensor]:
        """Returns the factors of each position's rotation, [n_positions, head_dim / 2] float32 each."""
        angles = torch.arange(n_positions).float()[:, None] * self.frequencies(head_dim)
        return angles.cos() * self.amplitude, angles.sin() * self.amplitude


def _rope_fields(fields: ConfigReader) -> ConfigReader:
    """Merges the settings of both formats.

    Transformers 5 writes ``rope_parameters``; Transformers 4 writes ``rope_theta`` and ``rope_scaling``.
    """
    values: dict[str, Any] = {"rope_theta": fields.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        section = fields.get(name)
        if section is None:
            continue
        if not isinstance(section, Mapping):
            raise fields.error(f"{name} is {section!r}; it must be an object")
        if layer_types := [key for key, value in section.items() if isinstance(value, Mapping)]:
            raise fields.error(f"{name} differs by layer type ({', '.join(layer_types)}), which is not supported")
        values.update(section)
    return fields.nested(values)


def _scaling(rope: ConfigReader, fields: ConfigReader, theta: float) -> Scaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind != "proportional":
        rope.allow_only(partial_rotary_factor=1.0)
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(_number(rope, "factor"))
        case "llama3":
            return _llama3(rope)
        case "proportional":
            return _proportional(rope)
        case "yarn":
            return _yarn(rope, fields, theta)
    raise rope.error(
        f"rope type {kind!r} is not supported; this release supports 'default', 'linear', 'llama3', 'proportional' "
        "and 'yarn'"
    )


def _number(rope: ConfigReader, name: str, default: float | None = None, *, maximum: float = _MAX_FACTOR) -> float:
    value = rope.number(name, default)
    if not 1.0 / maximum <= value <= maximum:
        raise rope.error(f"{name} is {value!r}; it must be between {1.0 / maximum:g} and {maximum:g}")
    return value


def _llama3(rope: ConfigReader) -> Llama3Scaling:
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


def _proportional(rope: ConfigReader) -> ProportionalScaling:
    part = rope.number("partial_rotary_factor", 1.0)
    if part > 1.0:
        raise rope.error(f"partial_rotary_factor is {part:g}; it must be above 0 and at most 1")
    return ProportionalScaling(part, _number(rope, "factor", 1.0))


def _yarn(rope: ConfigReader, fields: ConfigReader, theta: float) -> YarnScaling:
    rope.allow_only(mscale=None, mscale_all_dim=None)
    if theta <= 1:
        raise rope.error(f"rope_theta is {theta}; rope type 'yarn' needs it above 1")
    factor = _number(rope, "factor")
    # As in Transformers: the original length defaults to max_position_embeddings.
    length = "original_max_position_embeddings"
    return YarnScaling(
        factor=factor,
        beta_fast=_number(rope, "beta_fast", 32.0),
        beta_slow=_number(rope, "beta_slow", 1.0),
        original_max_position=rope.count(length, fields.get("max_position_embeddings")),
        truncate=rope.flag("truncate", default=True),
        amplitude=_number(rope, "attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
    )
