"""Layers with recurrent states: gated delta nets, and Mamba2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from radixkv.runtime.device.model_config.config_reader import ConfigReader
from radixkv.runtime.device.model_config.families import Architecture
from radixkv.runtime.device.model_config.halves import Half
from radixkv.runtime.device.model_config.windows import FULL

_LINEAR = "linear_attention"
"""Value of the field ``layer_types``."""


@dataclass(frozen=True)
class Mamba2Config:
    """What the layers of Mamba2 have besides the sizes of a state."""

    has_convolution_bias: bool
    time_step_limits: tuple[float, float]
    """Bounds of the time step by which a token lets the state decay."""


@dataclass(frozen=True)
class RecurrentConfig:
    """Configuration of recurrent layers, which have a state in place of K and V.

    These are gated delta nets (arXiv 2412.06464) or layers of Mamba2 (arXiv 2405.21060): a model has one kind.
    """

    layers: frozenset[int]
    """Indices of the recurrent layers; others have attention, or neither."""
    n_key_heads: int
    """Groups of Mamba2."""
    n_value_heads: int
    """A multiple of ``n_key_heads``."""
    key_dim: int
    """State size of Mamba2."""
    value_dim: int
    """Head size of Mamba2."""
    n_taps: int
    """Tokens that the convolution before the state sees, the token itself included."""
    is_fused: bool = False
    """Whether the projections of its inputs are two tensors in the files; see ``Architecture``."""
    mamba2: Mamba2Config | None = None
    """What Mamba2 has besides; None: the layers are gated delta nets."""

    @property
    def title(self) -> str:
        """What error messages call the layers."""
        return "gated delta nets" if self.mamba2 is None else "Mamba2 layers"

    @property
    def n_channels(self) -> int:
        """Values that the convolution mixes over tokens: queries, keys and values."""
        return 2 * self.n_key_heads * self.key_dim + self.n_value_heads * self.value_dim

    @property
    def group_sizes(self) -> tuple[int, int, int, int]:
        """Values of a token's query, key, values and output's gate that belong to one key head of a delta net."""
        n_values = self.n_value_heads // self.n_key_heads * self.value_dim
        return self.key_dim, self.key_dim, n_values, n_values

    @property
    def n_values(self) -> int:
        """Values of a token."""
        return self.n_value_heads * self.value_dim

    @property
    def n_inputs(self) -> int:
        """Values of a token that a layer's first projections give: the channels, the output's gate, and of each
        head the decay, and for delta nets the strength of the update."""
        return self.n_channels + self.n_values + (2 if self.mamba2 is None else 1) * self.n_value_heads

    def shard(self, n_ranks: int) -> RecurrentConfig:
        """Returns what each of several ranks computes: some of the key heads, with their value heads and states."""
        n_key_heads, n_value_heads = self.n_key_heads // n_ranks, self.n_value_heads // n_ranks
        return replace(self, n_key_heads=n_key_heads, n_value_heads=n_value_heads)


def parse_delta_nets(fields: ConfigReader, architecture: Architecture, n_layers: int) -> RecurrentConfig | None:
    """Returns the configuration of the layers that are gated delta nets; None if all have attention."""
    layer_types = fields.get("layer_types")
    if layer_types is None:
        interval = fields.count("full_attention_interval", 4)
        layer_types = [_LINEAR if (layer + 1) % interval else FULL for layer in range(n_layers)]
    if not isinstance(layer_types, list) or not all(name in (_LINEAR, FULL) for name in layer_types):
        raise fields.error(f"layer_types is {layer_types!r}; it must be a list of {_LINEAR!r} and {FULL!r}")
    if len(layer_types) != n_layers:
        raise fields.error(f"layer_types names {len(layer_types)} layers; num_hidden_layers is {n_layers}")
    layers = frozenset(layer for layer, name in enumerate(layer_types) if name == _LINEAR)
    if n_layers - 1 in layers:
        raise fields.error(f"layer_types ends with {_LINEAR!r}; this release needs {FULL!r} as the last one")
    if not layers:
        return None
    n_key_heads, n_value_heads = (
        fields.count("linear_num_key_heads", 16),
        fields.count("linear_num_value_heads", 32),
    )
    if n_value_heads % n_key_heads:
        raise fields.error(
            f"linear_num_value_heads {n_value_heads} is not a multiple of linear_num_key_heads {n_key_heads}"
        )
    return RecurrentConfig(
        layers=layers,
        n_key_heads=n_key_heads,
        n_value_heads=n_value_heads,
        key_dim=fields.count("linear_key_head_dim", 128),
        value_dim=fields.count("linear_value_head_dim", 128),
        n_taps=fields.count("linear_conv_kernel_dim", 4, minimum=2),
        is_fused=architecture.has_fused_delta_nets,
    )


def parse_mamba2(fields: ConfigReader, halves: Sequence[Half]) -> RecurrentConfig | None:
    """Returns the configuration of the layers of Mamba2; None if there are none."""
    layers = frozenset(layer for layer, half in enumerate(halves) if half == "recurrent")
    if not layers:
        return None
    n_groups, n_heads = fields.count("n_groups", 8), fields.count("mamba_num_heads", 128)
    if n_heads % n_groups:
        raise fields.error(f"mamba_num_heads {n_heads} is not a multiple of n_groups {n_groups}")
    return RecurrentConfig(
        layers=layers,
        n_key_heads=n_groups,
        n_value_heads=n_heads,
        key_dim=fields.count("ssm_state_size", 128),
        value_dim=fields.count("mamba_head_dim", 64),
        n_taps=fields.count("conv_kernel", 4, minimum=2),
        mamba2=Mamba2Config(
            has_convolution_bias=fields.flag("use_conv_bias", default=True),
            time_step_limits=_time_step_limits(fields),
        ),
    )


def _time_step_limits(fields: ConfigReader) -> tuple[float, float]:
    """Returns ``time_step_limit``: ``time_step_min`` and ``time_step_max`` say only how training begins."""
    limits = fields.get("time_step_limit")
    if limits is None:
        return 0.0, inf
    if isinstance(limits, list):  # Transformers writes a number that JSON does not have as an object
        limits = [inf if one == {"__float__": "Infinity"} else one for one in limits]
    match limits:
        case [int() | float() as least, int() | float() as most] if least <= most:
            return float(least), float(most)
    raise fields.error(f"time_step_limit is {limits!r}; it must be two numbers, the smaller one first")
