"""Nemotron-H: layers of Mamba2, attention and MLPs in any order, with states in the tree as of gated delta nets.

``test_delta_nets.py`` covers logits and bits of single steps; ``test_llm_states.py`` all kinds of hits, at night.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv import LLM, SamplingParams
from radixkv.checkpoints import resolve
from radixkv.errors import CheckpointError, ConfigError
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.model_support import check_model
from support.checkpoints import edited_config, save_checkpoint
from support.device_support import HYBRIDS, load_oracle, logits_of, random_ids

N_NEW = 16
END = 2
"""A token that ends a message."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemotron")
    save_checkpoint(folder, **HYBRIDS["nemotron-h"])
    return folder


def test_answers_are_those_of_transformers_also_from_a_state(folder: Path) -> None:
    shared = [one for one in random_ids(150, seed=1) if one != END]
    prompts = [[*shared[:100], END, *random_ids(n, seed=n)] for n in (20, 45)]
    params = SamplingParams(temperature=0.0, max_tokens=N_NEW, ignore_eos=True)
    oracle = load_oracle(resolve(str(folder)))
    with LLM(folder, device="cpu", dtype="float32", max_model_len=256, max_total_tokens=4096) as llm:
        outputs = [llm.generate([{"prompt_token_ids": one}], params)[0] for one in prompts]
    assert [output.num_cached_tokens for output in outputs] == [0, 64]
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        top = logits.topk(2).values
        is_clear = top[:, 0] - top[:, 1] > 5e-3
        assert is_clear.sum() > N_NEW // 2
        assert torch.equal(logits.argmax(-1)[is_clear], torch.tensor(answer)[is_clear])


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("*", {}),
        ("M*M", {"use_conv_bias": False}),
        ("--*MM*-", {"mlp_bias": False}),
        ("*M", {"tie_word_embeddings": True}),
    ],
)
def test_layers_in_any_order(tmp_path: Path, pattern: str, changes: dict[str, Any]) -> None:
    """Also as earlier releases write them, with a pattern of letters."""
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    save_checkpoint(
        tmp_path, **{**HYBRIDS["nemotron-h"], "layers_block_type": [names[one] for one in pattern], **changes}
    )
    with edited_config(tmp_path) as config:
        del config["layers_block_type"]
        config["hybrid_override_pattern"] = pattern
    tokens = random_ids(90, seed=2)
    with torch.inference_mode():
        expected = load_oracle(resolve(str(tmp_path)))(torch.tensor([tokens])).logits[0]
    assert expected.abs().max() > 1.0
    assert (logits_of(tmp_path, tokens) - expected).abs().mean() < 2e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers_block_type": ["full_attention", "x"]}, "layers_block_type has a layer 'x', which is not"),
        ({"layers_block_type": None, "hybrid_override_pattern": "*X"}, "hybrid_override_pattern has a layer 'X'"),
        ({"layers_block_type": ["attention", "moe"], "n_group": 3}, "n_group is 3 and topk_group 1; groups must"),
        ({"layers_block_type": ["attention", "moe"], "topk_group": 2}, "n_group is 1 and topk_group 2"),
        ({"moe_latent_size": 32}, "moe_latent_size 32 is not supported"),
        (
            {"layers_block_type": None},
            "hybrid_override_pattern is None; it must say what each of 1 to 1000 layers is",
        ),
        ({"layers_block_type": ["linear_attention", "mlp"]}, "layers_block_type has no attention"),
        ({"layers_block_type": ["mlp"] * 1001}, "it must say what each of 1 to 1000 layers is"),
        ({"n_groups": 4}, "mamba_num_heads 6 is not a multiple of n_groups 4"),
        ({"use_bias": True}, "use_bias True is not supported"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu' is not supported"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
    ],
)
def test_configurations_that_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    config = dict(resolve(str(folder)).config) | changes
    with pytest.raises(CheckpointError, match=message):
        DecoderConfig.parse(config, Path("config.json"))


def test_what_does_not_go_with_mamba2_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 4 does not divide n_groups, 2; use one that does"):
        LLM(folder, device="cpu", tensor_parallel_size=4)
    with pytest.raises(ConfigError, match="has Mamba2 layers, whose states cannot go back from a wrong draft"):
        LLM(folder, device="cpu", speculative_config={"method": "ngram"})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("nemotron-h", {}, "has Mamba2 layers with states of size 8; CUDA's kernels take 16, 32, 64, 128 and 256"),
        ("nemotron-h-moe", {"ssm_state_size": 16}, "has a router that chooses groups of experts first"),
        (
            "nemotron-h-moe",
            {"ssm_state_size": 16, "n_group": 1, "topk_group": 1, "head_dim": 12},
            "has heads of size 12; CUDA's kernels are built for",
        ),
    ],
)
def test_what_runs_on_the_cpu_only_is_refused_on_cuda(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    save_checkpoint(tmp_path, **HYBRIDS[name] | changes)
    with pytest.raises(ConfigError, match=f"NemotronHForCausalLM {message}.* device to cpu"):
        check_model(DecoderConfig.parse(resolve(str(tmp_path)).config, Path("config.json")))


@pytest.mark.parametrize("size", [64, 80])
def test_published_sizes_run_on_cuda(size: int) -> None:
    """Nemotron-H 8B has heads of 64, Nemotron Nano 9B v2 of 80."""
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "hybrid_override_pattern": "M-*-M",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_head_dim": size,
        "mamba_num_heads": 16,
        "n_groups": 8,
        "ssm_state_size": 128,
    }
    check_model(DecoderConfig.parse(config, Path("config.json")))
