"""What PEFT 0.21.2 adapts in a Llama of three layers, by the fields of an adapter's configuration."""

from __future__ import annotations

from typing import Any, NamedTuple

ENDS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""Of the names of a layer's linear modules."""
LAYERS = "model.layers."


class Case(NamedTuple):
    """Fields, and what PEFT makes of them."""

    fields: dict[str, Any]
    modules: dict[str, tuple[int, float]]
    """Rank and scale of each adapted module, whose name follows ``LAYERS``."""


CASES: dict[str, Case] = {
    "ends of names": Case(
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        {
            "0.self_attn.q_proj": (4, 2.0),
            "0.self_attn.v_proj": (4, 2.0),
            "1.self_attn.q_proj": (4, 2.0),
            "1.self_attn.v_proj": (4, 2.0),
            "2.self_attn.q_proj": (4, 2.0),
            "2.self_attn.v_proj": (4, 2.0),
        },
    ),
    "a part of a name is no end": Case(
        {"r": 4, "lora_alpha": 8, "target_modules": ["proj", "attn.o_proj", "mlp.up_proj"]},
        {
            "0.mlp.up_proj": (4, 2.0),
            "1.mlp.up_proj": (4, 2.0),
            "2.mlp.up_proj": (4, 2.0),
        },
    ),
    "whole names": Case(
        {"r": 4, "lora_alpha": 8, "target_modules": ["model.layers.0.self_attn.q_proj", "layers.2.mlp.down_proj"]},
        {
            "0.self_attn.q_proj": (4, 2.0),
            "2.mlp.down_proj": (4, 2.0),
        },
    ),
    "rank-stabilized": Case(
        {"r": 6, "lora_alpha": 7, "target_modules": ["q_proj"], "use_rslora": True},
        {
            "0.self_attn.q_proj": (6, 2.8577380332470415),
            "1.self_attn.q_proj": (6, 2.8577380332470415),
            "2.self_attn.q_proj": (6, 2.8577380332470415),
        },
    ),
    "patterns of ranks and alphas": Case(
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "k_proj", "down_proj"],
            "rank_pattern": {"q_proj": 3, "^model\\.layers\\.1\\..*k_proj": 5, "layers.1.self_attn.k_proj": 2},
            "alpha_pattern": {"down_proj": 2.5, "model.layers.0.self_attn.q_proj": 1, "proj": 100},
        },
        {
            "0.self_attn.q_proj": (3, 0.3333333333333333),
            "0.self_attn.k_proj": (4, 2.0),
            "0.mlp.down_proj": (4, 0.625),
            "1.self_attn.q_proj": (3, 2.6666666666666665),
            "1.self_attn.k_proj": (5, 1.6),
            "1.mlp.down_proj": (4, 0.625),
            "2.self_attn.q_proj": (3, 2.6666666666666665),
            "2.self_attn.k_proj": (4, 2.0),
            "2.mlp.down_proj": (4, 0.625),
        },
    ),
    "alternatives in a pattern": Case(
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "k_proj"],
            "rank_pattern": {"q_proj|self_attn.k_proj": 2},
            "alpha_pattern": {"layers.0.self_attn.q_proj|k_proj": 3},
            "use_rslora": True,
        },
        {
            "0.self_attn.q_proj": (2, 2.1213203435596424),
            "0.self_attn.k_proj": (2, 2.1213203435596424),
            "1.self_attn.q_proj": (2, 5.65685424949238),
            "1.self_attn.k_proj": (2, 2.1213203435596424),
            "2.self_attn.q_proj": (2, 5.65685424949238),
            "2.self_attn.k_proj": (2, 2.1213203435596424),
        },
    ),
    "a pattern of names": Case(
        {"r": 4, "lora_alpha": 8, "target_modules": ".*\\.layers\\.[02]\\.(self_attn\\.(q|o)_proj|mlp\\.up_proj)"},
        {
            "0.self_attn.q_proj": (4, 2.0),
            "0.self_attn.o_proj": (4, 2.0),
            "0.mlp.up_proj": (4, 2.0),
            "2.self_attn.q_proj": (4, 2.0),
            "2.self_attn.o_proj": (4, 2.0),
            "2.mlp.up_proj": (4, 2.0),
        },
    ),
    "all linear modules but some": Case(
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": "all-linear",
            "exclude_modules": ["down_proj", "model.layers.1.self_attn.o_proj"],
        },
        {
            "0.self_attn.q_proj": (4, 2.0),
            "0.self_attn.k_proj": (4, 2.0),
            "0.self_attn.v_proj": (4, 2.0),
            "0.self_attn.o_proj": (4, 2.0),
            "0.mlp.gate_proj": (4, 2.0),
            "0.mlp.up_proj": (4, 2.0),
            "1.self_attn.q_proj": (4, 2.0),
            "1.self_attn.k_proj": (4, 2.0),
            "1.self_attn.v_proj": (4, 2.0),
            "1.mlp.gate_proj": (4, 2.0),
            "1.mlp.up_proj": (4, 2.0),
            "2.self_attn.q_proj": (4, 2.0),
            "2.self_attn.k_proj": (4, 2.0),
            "2.self_attn.v_proj": (4, 2.0),
            "2.self_attn.o_proj": (4, 2.0),
            "2.mlp.gate_proj": (4, 2.0),
            "2.mlp.up_proj": (4, 2.0),
        },
    ),
    "a pattern of excluded names": Case(
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "v_proj"],
            "exclude_modules": "model\\.layers\\.1\\..*",
        },
        {
            "0.self_attn.q_proj": (4, 2.0),
            "0.self_attn.v_proj": (4, 2.0),
            "2.self_attn.q_proj": (4, 2.0),
            "2.self_attn.v_proj": (4, 2.0),
        },
    ),
    "some layers": Case(
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "v_proj"],
            "layers_to_transform": [0, 2],
            "layers_pattern": "layers",
        },
        {
            "0.self_attn.q_proj": (4, 2.0),
            "0.self_attn.v_proj": (4, 2.0),
            "2.self_attn.q_proj": (4, 2.0),
            "2.self_attn.v_proj": (4, 2.0),
        },
    ),
    "one layer": Case(
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": 1},
        {
            "1.self_attn.q_proj": (4, 2.0),
            "1.self_attn.v_proj": (4, 2.0),
        },
    ),
    "whole names of other layers": Case(
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "model.layers.0.self_attn.v_proj"],
            "layers_to_transform": [2],
            "layers_pattern": ["blocks", "layers"],
        },
        {
            "0.self_attn.v_proj": (4, 2.0),
            "2.self_attn.q_proj": (4, 2.0),
        },
    ),
    "activated": Case(
        {
            "r": 2,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "k_proj", "v_proj"],
            "alora_invocation_tokens": [5, 6, 7],
            "task_type": "CAUSAL_LM",
        },
        {
            "0.self_attn.q_proj": (2, 4.0),
            "0.self_attn.k_proj": (2, 4.0),
            "0.self_attn.v_proj": (2, 4.0),
            "1.self_attn.q_proj": (2, 4.0),
            "1.self_attn.k_proj": (2, 4.0),
            "1.self_attn.v_proj": (2, 4.0),
            "2.self_attn.q_proj": (2, 4.0),
            "2.self_attn.k_proj": (2, 4.0),
            "2.self_attn.v_proj": (2, 4.0),
        },
    ),
}
"""Recorded; a nightly test compares them with PEFT."""
