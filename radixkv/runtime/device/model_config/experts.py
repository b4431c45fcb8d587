"""The mixture-of-experts layers, as ``config.json`` describes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from radixkv.runtime.device.model_config.config_reader import MAX_COUNT, ConfigReader
from radixkv.runtime.device.model_config.families import ExpertFields


@dataclass(frozen=True)
class SigmoidRouting:
    """A router whose scores are sigmoids. It adds a correction to the scores only where it chooses."""

    n_groups: int
    """Groups of experts."""
    n_used_groups: int
    """Groups of a token: those whose two best experts have the largest sums of scores."""
    scale: float
    """Multiplier of the experts' weights."""


@dataclass(frozen=True)
class ExpertConfig:
    """Configuration of the mixture-of-experts layers."""

    n_experts: int
    n_active: int
    """Number of experts that compute each token."""
    inner_size: int
    """Intermediate size of one expert."""
    shared_inner_size: int | None
    """Intermediate size of the expert that computes every token; None: there is none."""
    normalizes: bool
    """Whether the weights of a token's experts are normalised to sum to 1."""
    are_stacked: bool
    """Whether a projection of all experts is one tensor; see ``ExpertFields.are_stacked``."""
    sparse_step: int
    """Layer ``i`` has experts if ``i + 1`` is a multiple of this, unless it is in ``dense_layers``."""
    dense_layers: frozenset[int]
    """Indices of layers that have a plain MLP regardless of ``sparse_step``."""
    sigmoid: SigmoidRouting | None = None
    """How the router chooses by sigmoids, where the shared expert has no weight; None: it chooses by softmax."""
    are_beside_mlp: bool = False
    """Whether a layer with experts has an MLP too; see ``ExpertFields.are_beside_mlp``."""

    def shard(self, n_ranks: int) -> ExpertConfig:
        """Returns what each of several ranks computes of the experts: some of the values inside each."""
        shared = self.shared_inner_size
        return replace(
            self,
            inner_size=self.inner_size // n_ranks,
            shared_inner_size=None if shared is None else shared // n_ranks,
        )


def parse_experts(fields: ConfigReader, names: ExpertFields) -> ExpertConfig | None:
    """Returns the configuration of the experts, None if there are none."""
    if names.switch is not None and not fields.flag(names.switch):
        return None
    count = next((name for name in names.count if fields.get(name) is not None), names.count[0])
    n_experts, n_active = fields.count(count, maximum=MAX_COUNT), fields.count(names.active)
    if n_active > n_experts:
        raise fields.error(f"{names.active} {n_active} is more than {count} {n_experts}")
    dense_layers = fields.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or not all(type(layer) is int for layer in dense_layers):
        raise fields.error(f"mlp_only_layers is {dense_layers!r}; it must be a list of layer indices")
    return ExpertConfig(
        n_experts=n_experts,
        n_active=n_active,
        inner_size=fields.count(names.inner_size),
        shared_inner_size=None if names.shared_inner_size is None else fields.count(names.shared_inner_size),
        normalizes=names.normalizes or fields.flag("norm_topk_prob", default=names.default_normalizes),
        are_stacked=names.are_stacked,
        sparse_step=fields.count("decoder_sparse_step", 1),
        dense_layers=frozenset(dense_layers),
        sigmoid=_sigmoid_routing(fields, n_experts) if names.routes_by_sigmoid else None,
        are_beside_mlp=names.are_beside_mlp,
    )


def _sigmoid_routing(fields: ConfigReader, n_experts: int) -> SigmoidRouting:
    n_groups, n_used = fields.count("n_group", 1), fields.count("topk_group", 1)
    if n_experts % n_groups or n_used > n_groups or (n_groups > 1 and n_experts < 2 * n_groups):
        raise fields.error(
            f"n_group is {n_groups} and topk_group {n_used}; groups must have the same number of the {n_experts} "
            "experts, at least two, and no more may be used than there are"
        )
    return SigmoidRouting(n_groups, n_used, fields.number("routed_scaling_factor", 1.0))
