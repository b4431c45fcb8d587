"""An adapter's ``adapter_config.json``, whose fields that cannot be served are refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from radixkv.checkpoints.adapters.patterns import Pattern, first_matches
from radixkv.checkpoints.adapters.refusal import refusal
from radixkv.checkpoints.adapters.targets import Targets
from radixkv.checkpoints.files import is_integer, read_object
from radixkv.errors import CheckpointError

CONFIG_NAME = "adapter_config.json"
_MAX_CHARACTERS = 1_000_000
"""Of the file, which is parsed while nothing else runs. One with ranks of all modules of an 8B model has 10 KB."""

_MERGE = "merge the adapter into its base and serve the merged model"
_REFUSED = MappingProxyType(
    {
        "use_dora": f"DoRA is not served; {_MERGE}",
        "modules_to_save": f"modules that are trained whole are not served; {_MERGE}",
        "lora_bias": f"biases are not served; {_MERGE}",
        "trainable_token_indices": f"trained embeddings are not served; {_MERGE}",
        "target_parameters": f"parameters of experts are not adapted; train linear modules, or {_MERGE}",
        "layer_replication": f"an adapter cannot add layers; {_MERGE}",
        "use_qalora": f"QALoRA is not served; {_MERGE}",
        "use_bdlora": f"block-diagonal LoRA is not served; {_MERGE}",
        "arrow_config": "routing among adapters is not served; serve each adapter under its own name",
        "kasa_config": f"KaSA changes the base; {_MERGE}",
        "velora_config": f"VeLoRA is not served; {_MERGE}",
        "monteclora_config": f"outputs of Monteclora are drawn at random; {_MERGE}",
        "megatron_config": "modules of Megatron are not served; save the adapter with the names of Transformers",
    }
)
"""Fields of features that change outputs, and what to do; without the feature they are null, false or empty."""
_INITS = (True, False, "gaussian", "orthogonal", "eva", "mica")
"""Values of ``init_lora_weights`` that leave the base model's weights alone."""
_READ = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "bias",
        "init_lora_weights",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "alora_invocation_tokens",
        "base_model_name_or_path",
    }
)
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Fields that change no output: of training, of the features above, and of how the base stores its matrices."""


class ModuleConfig(NamedTuple):
    """What an adapter's configuration says of a module."""

    is_adapted: bool
    rank: int
    scale: float
    """What its product is multiplied by."""


@dataclass(frozen=True)
class PeftConfig:
    """What an adapter's configuration says of its modules."""

    path: Path
    """Of the file."""
    rank: int
    alpha: float
    ranks: tuple[tuple[Pattern, int], ...]
    """Ranks of modules whose names match a pattern; the first match decides."""
    alphas: tuple[tuple[Pattern, float], ...]
    is_rank_stabilized: bool
    """Whether products are scaled by ``alpha / sqrt(rank)`` instead of ``alpha / rank``."""
    targets: Targets
    invocation_tokens: tuple[int, ...] | None
    """The last such tokens of a prompt activate the adapter; None: it is active everywhere."""
    base_model: str | None

    @classmethod
    def read(cls, folder: Path) -> PeftConfig:
        """Reads the file of a folder.

        Raises:
            CheckpointError: there is no such file, or a field is invalid or cannot be served.
        """
        path = folder / CONFIG_NAME
        what = f"has no {CONFIG_NAME}"
        try:
            fields = read_object(path, max_characters=_MAX_CHARACTERS) if folder.is_dir() else None
            if fields is None and not folder.is_dir():
                what = "is no folder"
        except OSError as error:  # of is_dir: no permission, or too long a name
            fields, what = None, f"cannot be read: {error.strerror}"
        if fields is None:
            raise CheckpointError(
                f"{folder} {what}; give the folder to which PEFT's save_pretrained wrote the adapter"
            )
        _check_features(fields, path)
        rank = _rank(fields.get("r"), "r", path)
        alpha = _alpha(fields.get("lora_alpha"), "lora_alpha", path)
        return cls(
            path,
            rank,
            alpha,
            tuple(
                (pattern, _rank(one, "rank_pattern", path))
                for pattern, one in _by_name(fields, "rank_pattern", path)
            ),
            tuple(
                (pattern, _alpha(one, "alpha_pattern", path))
                for pattern, one in _by_name(fields, "alpha_pattern", path)
            ),
            _boolean(fields, "use_rslora", path),
            Targets.parse(fields, path),
            _invocation_tokens(fields.get("alora_invocation_tokens"), path),
            _base_model(fields.get("base_model_name_or_path"), path),
        )

    def modules(self, names: Iterable[str]) -> Mapping[str, ModuleConfig]:
        """Returns what is said of modules.

        Args:
            names: of the modules, as ``Targets.select`` takes them.

        Raises:
            CheckpointError: as ``first_matches``, whose cost this has.
        """
        names = tuple(names)
        groups = [*self.targets.groups, *([pattern for pattern, _ in one] for one in (self.ranks, self.alphas))]
        *matches, ranks, alphas = first_matches(groups, names, self.path)
        adapted = self.targets.selected(names, matches)
        modules = {}
        for name in names:
            rank = self.ranks[ranks[name].number][1] if name in ranks else self.rank
            alpha = self.alphas[alphas[name].number][1] if name in alphas else self.alpha
            scale = alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)
            modules[name] = ModuleConfig(name in adapted, rank, scale)
        return modules


def _check_features(fields: Mapping[str, Any], path: Path) -> None:
    """Raises ``CheckpointError`` if the adapter is no LoRA, or has a feature that this release does not have."""
    if (kind := fields.get("peft_type")) != "LORA":
        raise refusal(path, "peft_type", kind, "this release serves LORA")
    for field, advice in _REFUSED.items():
        if value := fields.get(field):
            raise refusal(path, field, value, advice)
    if (bias := fields.get("bias", "none")) != "none":
        raise refusal(path, "bias", bias, f'this release serves "none"; {_MERGE}')
    init = fields.get("init_lora_weights", True)
    if not any(init is one or (isinstance(one, str) and init == one) for one in _INITS):
        raise refusal(
            path,
            "init_lora_weights",
            init,
            "this changes the base's weights; convert the adapter with save_pretrained's "
            "path_initial_model_for_weight_conversion",
        )
    for field, value in fields.items():
        if value and field not in _REFUSED and field not in _READ and field not in _WITHOUT_EFFECT:
            raise refusal(
                path,
                field,
                value,
                "this release does not know the field; remove it if outputs do not depend on it",
            )


def _rank(value: object, field: str, path: Path) -> int:
    if not is_integer(value) or value < 1:
        raise refusal(path, field, value, "a rank must be a positive integer; save the adapter again")
    return value


def _alpha(value: object, field: str, path: Path) -> float:
    try:
        if isinstance(value, float) or is_integer(value):
            alpha = float(value)
            if math.isfinite(alpha):
                return alpha
    except OverflowError:
        pass
    raise refusal(path, field, value, "an alpha must be a finite number; save the adapter again")


def _boolean(fields: Mapping[str, Any], field: str, path: Path) -> bool:
    value = fields.get(field)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise refusal(path, field, value, "it must be true or false; save the adapter again")
    return value


def _by_name(fields: Mapping[str, Any], field: str, path: Path) -> list[tuple[Pattern, object]]:
    """Returns the values of a field by patterns, each of which matches the end of a module's name from a dot on."""
    value = fields.get(field) or {}
    if not isinstance(value, dict):
        raise refusal(path, field, value, "it must be an object by patterns of names; save the adapter again")
    return [(Pattern(rf"(.*\.)?({name})$", "begin", field, name), one) for name, one in value.items()]


def _invocation_tokens(value: object, path: Path) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(is_integer(token) and token >= 0 for token in value):
        raise refusal(
            path, "alora_invocation_tokens", value, "it must be a list of token ids, or null for LoRA on all tokens"
        )
    return tuple(value)


def _base_model(value: object, path: Path) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    raise refusal(path, "base_model_name_or_path", value, "it must be a name; save the adapter again")
