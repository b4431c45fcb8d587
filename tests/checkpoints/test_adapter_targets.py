"""Which modules adapters adapt, with which rank and scale: as PEFT says, and as whole parts of names say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.checkpoints.adapters import AdapterFolder
from radixkv.checkpoints.adapters.config import PeftConfig
from radixkv.checkpoints.adapters.targets import Targets
from support.adapters import Sizes, write_adapter
from support.cases import examples
from support.peft_cases import CASES, ENDS, LAYERS, Case

_NAMES = [f"{LAYERS}{layer}.{end}" for layer in range(3) for end in ENDS] + [
    "model.layers.1.mlp.experts.2.up_proj",
    "model.layers.2.mlp.experts.1.up_proj",
]
_PARTS = st.sampled_from(
    [
        *(
            "q_proj",
            "k_proj",
            "up_proj",
            "proj",
            "self_attn.q_proj",
            "mlp.up_proj",
            "attn.q_proj",
            "1.self_attn.q_proj",
        ),
        *("layers.2.mlp.down_proj", "model.layers.0.self_attn.v_proj", "o_proj", "2.up_proj"),
    ]
)
_LISTS = st.lists(_PARTS, max_size=4)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_modules_ranks_and_scales_are_those_of_peft(tmp_path: Path, case: Case) -> None:
    """PEFT's are recorded in ``support.peft_cases``."""
    modules = {f"{LAYERS}{name}": Sizes(rank, 8, 6) for name, (rank, _) in case.modules.items()}
    folder = AdapterFolder.open(write_adapter(tmp_path, modules, **case.fields), max_rank=64)
    found = {name.removeprefix(LAYERS): (shape.rank, shape.scale) for name, shape in folder.modules.items()}
    assert found == case.modules
    targets = Targets.parse(case.fields, tmp_path)
    names = [f"{LAYERS}{layer}.{end}" for layer in range(3) for end in ENDS]
    assert targets.select(names) == {f"{LAYERS}{name}" for name in case.modules}


@given(
    included=_LISTS,
    excluded=_LISTS,
    layers=st.none() | st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=3),
    pattern=st.sampled_from([None, "layers", ["blocks", "layers"], [], "blocks"]),
)
@examples(300)
def test_names_end_with_whole_parts(
    included: list[str], excluded: list[str], layers: int | list[int] | None, pattern: str | list[str] | None
) -> None:
    fields = {
        "target_modules": included,
        "exclude_modules": excluded,
        "layers_to_transform": layers,
        "layers_pattern": pattern,
    }
    targets = Targets.parse(fields, Path("adapter_config.json")).select(_NAMES)
    for name in _NAMES:
        index = int(name.split(".")[2])
        is_in_layer = layers in (None, []) or (
            pattern != "blocks" and index in (layers if isinstance(layers, list) else [layers])
        )
        expected = any(_is_end(part, name) and (is_in_layer or part == name) for part in included)
        assert (name in targets) == (expected and not any(_is_end(part, name) for part in excluded))


@given(
    ranks=st.lists(st.tuples(_PARTS, st.integers(1, 9)), max_size=4, unique_by=lambda item: item[0]),
    alphas=st.lists(
        st.tuples(_PARTS, st.sampled_from([-1, 0.5, 3, 16])), max_size=4, unique_by=lambda item: item[0]
    ),
    is_rank_stabilized=st.booleans(),
)
@examples(300)
def test_the_first_pattern_that_matches_decides(
    tmp_path_factory: pytest.TempPathFactory,
    ranks: list[tuple[str, int]],
    alphas: list[tuple[str, float]],
    is_rank_stabilized: bool,
) -> None:
    fields: dict[str, Any] = {
        "rank_pattern": {part.replace(".", r"\."): rank for part, rank in ranks},
        "alpha_pattern": {part.replace(".", r"\."): alpha for part, alpha in alphas},
        "use_rslora": is_rank_stabilized,
    }
    config = PeftConfig.read(write_adapter(tmp_path_factory.mktemp("adapter"), {}, **fields))
    modules = config.modules(_NAMES)
    for name in _NAMES:
        rank = next((rank for part, rank in ranks if _is_end(part, name)), 4)
        alpha = next((alpha for part, alpha in alphas if _is_end(part, name)), 8)
        assert modules[name].rank == rank
        assert modules[name].scale == (alpha / math.sqrt(rank) if is_rank_stabilized else alpha / rank)


def _is_end(part: str, name: str) -> bool:
    parts = part.split(".")
    return name.split(".")[-len(parts) :] == parts


def test_an_alternative_of_layers_pattern_may_match_without_an_index() -> None:
    """PEFT then adapts no module."""
    fields = {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "m|layers"}
    targets = Targets.parse(fields, Path("adapter_config.json"))
    assert not targets.select(_NAMES)


def test_a_layer_whose_number_has_thousands_of_digits_is_none_of_those_to_transform() -> None:
    """Python converts no such number, whatever says which part of the name it is."""
    names = ["model.layers.0.self_attn.q_proj", f"model.layers.{'1' * 5000}.self_attn.q_proj"]
    for pattern in ({}, {"layers_pattern": "layers"}):
        fields = {"target_modules": ["q_proj"], "layers_to_transform": [0, 1], **pattern}
        assert Targets.parse(fields, Path("adapter_config.json")).select(names) == {names[0]}
