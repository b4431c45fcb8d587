"""Adapters that PEFT itself makes and saves; `make test-nightly` installs it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.checkpoints import resolve
from radixkv.checkpoints.adapters import AdapterFolder
from radixkv.checkpoints.adapters.config import PeftConfig
from radixkv.checkpoints.adapters.targets import Targets
from radixkv.errors import CheckpointError
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.weights.adapter_matrices import AdapterMatrices
from radixkv.runtime.device.weights.shapes import tensor_shapes
from support.adapters import write_adapter
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, HYBRIDS, load_oracle
from support.peft_cases import CASES, LAYERS, Case

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft", reason="PEFT is installed by `make test-nightly`")

from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

_ATTENTION = r".*layers\.\d+\.(self_attn|linear_attn|mixer)\.((q|k|v|o|out)_proj|in_proj_(qkv|z|b|a|qkvz|ba))"
_DENSE = rf"{_ATTENTION}|.*layers\.\d+\.(mlp\.(gate|up|down)_proj|fc[12])"
_PREFIX = "base_model.model."
_PARTS = st.sampled_from(
    [
        *(
            "q_proj",
            "proj",
            ".*_proj",
            "[qv]_proj",
            "q_proj|k_proj",
            "self_attn",
            r"layers\.1\..*",
            r"^model\..*up_proj",
        ),
        *("up_proj$", r".*\.layers\.[02]\.(self_attn\.(q|o)_proj|mlp\.up_proj)", "", "model.layers.0.mlp.up_proj"),
        *(r"\d+\.self_attn\.v_proj", "layers.1.self_attn.q_proj", "lm_head", "experts.1.up_proj"),
    ]
)
_NAMES = [
    f"{wrapper}layers.{layer}.{end}"
    for wrapper in ("model.", "model.language_model.", "")
    for layer in range(3)
    for end in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.experts.1.up_proj")
]


def _llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=3, **sizes))


def _adapted(base: torch.nn.Module, **fields: Any) -> Any:
    """Returns the model with a new adapter of random values."""
    model = peft.get_peft_model(base, peft.LoraConfig(**fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


def _layers(model: Any) -> dict[str, Any]:
    """Returns PEFT's layers by the name of the module that each adapts."""
    return {
        name.removeprefix(_PREFIX): module
        for name, module in model.named_modules()
        if "default" in getattr(module, "lora_A", {})
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_modules_are_those_of_peft(tmp_path: Path, case: Case) -> None:
    model = _adapted(_llama(), **case.fields)
    model.save_pretrained(tmp_path)
    folder = AdapterFolder.open(tmp_path, max_rank=64)
    layers = _layers(model)
    assert folder.modules.keys() == layers.keys()
    recorded = {}
    for name, layer in layers.items():
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert folder.modules[name] == (len(a), a.shape[1], len(b), layer.scaling["default"])
        stored = AdapterMatrices(folder).pair(name)
        assert torch.equal(stored[0], a)
        assert torch.equal(stored[1], b)
        recorded[name.removeprefix(LAYERS)] = (len(a), layer.scaling["default"])
    assert recorded == case.modules
    assert folder.invocation_tokens == (tuple(case.fields.get("alora_invocation_tokens", ())) or None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_product_is_that_of_peft(tmp_path: Path, dtype: torch.dtype) -> None:
    model = _adapted(_llama(), target_modules=["q_proj", "down_proj"], lora_alpha=3, use_rslora=True, r=5).to(dtype)
    model.save_pretrained(tmp_path)
    folder = AdapterFolder.open(tmp_path, max_rank=8)
    for name, layer in _layers(model).items():
        a, b = AdapterMatrices(folder).pair(name)
        x = torch.randn(7, a.shape[1], dtype=dtype)
        expected = layer(x) - layer.base_layer(x)
        assert a.dtype == dtype
        torch.testing.assert_close(folder.modules[name].scale * (x @ a.T @ b.T), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("lora_bias", True),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("trainable_token_indices", [1, 2]),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("target_parameters", ["mlp.down_proj.weight"]),
    ],
)
def test_what_changes_outputs_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    targets = [] if field == "target_parameters" else ["q_proj"]
    _adapted(_llama(), **{"target_modules": targets, field: value}).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"{field} is "):
        AdapterFolder.open(tmp_path, max_rank=64)


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "mica"])
def test_what_leaves_the_base_alone_is_read(tmp_path: Path, init: Any) -> None:
    base = _llama()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = _adapted(base, target_modules=["q_proj"], r=4, init_lora_weights=init)
    after = {name.removeprefix(_PREFIX).replace("base_layer.", ""): one for name, one in model.state_dict().items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    model.save_pretrained(tmp_path)
    assert len(AdapterFolder.open(tmp_path, max_rank=64).modules) == 3


@pytest.mark.parametrize("targets", [["q_proj", "embed_tokens"], ["q_proj", "lm_head"]], ids=str)
def test_embeddings_are_refused(tmp_path: Path, targets: list[str]) -> None:
    _adapted(_llama(), target_modules=targets).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="is an embedding|is an adapted embedding|is an output head"):
        AdapterFolder.open(tmp_path, max_rank=64)


@given(
    included=_PARTS | st.lists(_PARTS, max_size=4),
    excluded=st.none() | _PARTS | st.lists(_PARTS, max_size=3),
    layers=st.none() | st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=3),
    pattern=st.sampled_from([None, "layers", ["blocks", "layers"], [], "blocks", "lay.*", "m|layers"]),
)
@settings(max_examples=2000, deadline=None)
def test_targets_are_those_of_peft(
    included: str | list[str],
    excluded: str | list[str] | None,
    layers: int | list[int] | None,
    pattern: str | list[str] | None,
) -> None:
    if isinstance(included, str):  # PEFT refuses the others then
        layers = pattern = None
    fields = {"target_modules": included, "exclude_modules": excluded, "layers_to_transform": layers}
    if layers is not None:
        fields["layers_pattern"] = pattern
    theirs = peft.LoraConfig(**fields)
    targets = Targets.parse(fields, Path("adapter_config.json")).select(_NAMES)
    for name in _NAMES:
        assert (name in targets) == bool(check_target_module_exists(theirs, name)), name


@given(
    ranks=st.dictionaries(_PARTS, st.integers(1, 9), max_size=4),
    alphas=st.dictionaries(_PARTS, st.sampled_from([-1, 0.5, 3, 16]), max_size=4),
)
@settings(max_examples=1000, deadline=None)
def test_patterns_are_those_of_peft(
    tmp_path_factory: pytest.TempPathFactory, ranks: dict[str, int], alphas: dict[str, float]
) -> None:
    path = write_adapter(tmp_path_factory.mktemp("adapter"), {}, rank_pattern=ranks, alpha_pattern=alphas)
    config = PeftConfig.read(path)
    modules = config.modules(_NAMES)
    for name in _NAMES:
        rank = ranks.get(get_pattern_key(ranks.keys(), name), 4)
        alpha = alphas.get(get_pattern_key(alphas.keys(), name), 8)
        assert (modules[name].rank, modules[name].scale) == (rank, alpha / rank)


@pytest.mark.parametrize("name", (CHECKPOINTS | HYBRIDS).keys())
def test_names_fit_the_base(tmp_path: Path, name: str) -> None:
    """Adapters of all attention and MLPs, of each architecture, have the names of the base's tensors."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_checkpoint(base, **(CHECKPOINTS | HYBRIDS)[name])
    checkpoint = resolve(str(base))
    config = DecoderConfig.parse(checkpoint.config, base / "config.json")
    targets = _DENSE if config.experts is None else _ATTENTION
    excluded = "out_proj" if name.startswith("nemotron") else "no_module"  # PEFT refuses that of Mamba
    model = _adapted(load_oracle(checkpoint), target_modules=targets, exclude_modules=[excluded])
    model.save_pretrained(adapter)
    folder = AdapterFolder.open(adapter, max_rank=8)
    shapes = {
        one.removesuffix(".weight"): shape
        for one, shape in tensor_shapes(config).items()
        if len(shape) == 2 and one.endswith(".weight")
    }
    fitted = folder.for_base(config.names.layers, shapes)
    assert len(fitted.modules) == len(folder.modules)
    ends = {one.removeprefix(config.names.layers).partition(".")[2] for one in fitted.modules}
    assert any(end.endswith("q_proj") for end in ends)
