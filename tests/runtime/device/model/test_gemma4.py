"""Gemma 4: layers whose heads differ, KV that layers share, layers' own inputs, and experts beside an MLP.

``test_against_transformers.py`` and ``test_batch_invariance.py`` cover logits and bits of single steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from radixkv import LLM, SamplingParams
from radixkv.checkpoints import resolve
from radixkv.errors import CheckpointError
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.memory.page_shape import LayerPlace, PageLayout
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.model_config.heads import LayerHeads
from radixkv.runtime.device.weights.open import open_weights
from support.cases import rest_nightly
from support.checkpoints import VOCAB, edited_config, edited_tensors, save_checkpoint
from support.cold_answers import ColdAnswers
from support.cpu_server import CpuServer, ids, recorded_logits
from support.device_support import OTHERS, load_oracle, logits_of, random_ids
from support.evicting import evict_all
from support.greedy_oracle import check_greedy

N_NEW = 40
SLIDING, FULL = "sliding_attention", "full_attention"
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
AUDIO = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "output_proj_dims": 16,
    "subsampling_conv_channels": [4, 4],
}
UNIFIED_VISION = {"patch_size": 2, "pooling_kernel_size": 1, "mm_embed_dim": 16, "mm_posemb_size": 8}
UNIFIED = ["vision_embedder", "embed_vision", "embed_audio"]
PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "layer_types": [SLIDING, FULL] * 2,
    "hidden_size_per_layer_input": 0,
}


def parse(**changes: Any) -> DecoderConfig:
    return DecoderConfig.parse(PUBLISHED | changes, Path("config.json"))


@pytest.fixture(scope="module", params=rest_nightly(["gemma4-shared", "gemma4-moe"], kept=(0,)))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    save_checkpoint(folder, **OTHERS[request.param])
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """Its pool holds a few of the prompts, and its steps a part of one."""
    with LLM(
        folder,
        device="cpu",
        dtype="float32",
        max_model_len=160,
        page_size=8,
        max_total_tokens=160,
        max_num_batched_tokens=48,
        num_reserved_decode_tokens=0,
    ) as opened:
        yield opened


def answers(llm: LLM, prompts: Sequence[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=N_NEW, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_greedy_answers_alone_batched_chunked_with_hits_after_evictions_and_preemptions(
    llm: LLM, folder: Path
) -> None:
    shared = random_ids(70, seed=1)
    prompts = [shared + random_ids(n, seed=n) for n in (5, 20, 41)]
    prompts += [random_ids(n, seed=n) for n in (90, 3, 64)]
    before = llm.get_metrics().preemptions_total
    together = answers(llm, prompts)
    assert llm.get_metrics().preemptions_total > before
    for _ in range(2):  # the pool holds some of the prompts: the others were evicted
        assert [answers(llm, [prompt])[0] for prompt in prompts] == together
    explained = llm.explain({"prompt_token_ids": prompts[-1]})
    assert explained.n_cached > 0
    check_greedy(load_oracle(resolve(str(folder))), zip(prompts, together, strict=True))


def test_pages_come_back_from_the_host_and_from_disk_to_the_bit(folder: Path, tmp_path: Path) -> None:
    checkpoint = resolve(str(folder))
    prompts = {seed: ids(30 + 8 * seed, seed) for seed in (1, 2)}
    cold = ColdAnswers(checkpoint, prompts, 5)
    settings: dict[str, Any] = {"n_pages": 40, "host_memory_bytes": 8 << 20, "cache_dir": tmp_path / "cache"}
    for n_loaded in (0, 1):
        with recorded_logits() as logits:
            server = CpuServer(checkpoint, **settings)
            for seed, prompt in prompts.items():
                server.serve(seed, prompt, 5)
                server.finish_copies()
            assert all((server.outputs[seed].n_loaded > 0) == n_loaded for seed in prompts), (
                "from disk the second time"
            )
            cold.check(server, logits)
            evict_all(server.cache)
            server.serve(1, prompts[1], 5)
            assert server.outputs[1].n_loaded > 0
            cold.check(server, logits, [1])
            server.loop.close()


@pytest.mark.parametrize(
    ("name", "parts", "unused"),
    [
        ("gemma4-shared", {"vision_config": VISION}, ["vision_tower", "embed_vision"]),
        ("gemma4-shared", {"vision_config": VISION, "audio_config": AUDIO}, ["audio_tower", "embed_audio"]),
        ("gemma4-unified", {"vision_config": UNIFIED_VISION, "audio_config": {"audio_embed_dim": 8}}, UNIFIED),
    ],
)
def test_the_text_model_of_a_published_checkpoint(
    tmp_path: Path, name: str, parts: dict[str, Any], unused: list[str]
) -> None:
    model_type = OTHERS[name]["model_type"].removesuffix("_text")
    save_checkpoint(tmp_path, **(OTHERS[name] | parts | {"model_type": model_type}))
    found = {name.split(".")[1] for name in load_file(tmp_path / "model.safetensors")}
    assert {*unused, "language_model"} <= found
    tokens = random_ids(60, seed=3)
    with torch.inference_mode():
        expected = load_oracle(resolve(str(tmp_path)))(torch.tensor([tokens])).logits[0]
    assert (logits_of(tmp_path, tokens) - expected).abs().mean() < 1e-5


def test_projections_of_layers_that_read_the_kv_of_others_are_skipped(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **OTHERS["gemma4-shared"])
    before = logits_of(tmp_path, random_ids(30, seed=4))
    with edited_tensors(tmp_path) as tensors:
        for name in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.layers.4.self_attn.{name}.weight"] = torch.full((32, 48), torch.nan)
        tensors["model.layers.4.self_attn.k_proj.weight_scale"] = torch.full((32,), torch.nan)
    assert torch.equal(logits_of(tmp_path, random_ids(30, seed=4)), before)
    with edited_tensors(tmp_path) as tensors:
        tensors["model.layers.0.self_attn.extra.weight"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"does not call for: model\.layers\.0\.self_attn\.extra"):
        logits_of(tmp_path, [1])


def test_sizes_of_layers_as_both_releases_of_transformers_write_them(tmp_path: Path) -> None:
    full = {"global_head_dim": 24, "num_global_key_value_heads": 1}
    found = parse(**full, attention_k_eq_v=True)
    sliding = LayerHeads(2, 16, 16)
    assert found.heads == (sliding, LayerHeads(1, 24, 24, has_values=False)) * 2
    by_layer = {str(layer): {"head_dim": 24, "num_key_value_heads": 1} for layer in (1, 3)}
    assert parse(per_layer_config=by_layer, attention_k_eq_v=True) == found
    assert parse(**full).heads == (sliding, LayerHeads(2, 24, 24)) * 2, "other numbers of heads go with K = V"
    assert parse().heads[1].head_dim == 512
    forced = parse(layer_types=[FULL, SLIDING, FULL, SLIDING])
    assert forced.windows == (None, 512, None, None), "as in Transformers"


def test_a_page_has_a_part_for_each_shape_and_none_for_shared_kv() -> None:
    config = parse(global_head_dim=32, num_kv_shared_layers=2)
    page = PageLayout.of(config, 8, torch.float32)
    assert [(part.n_layers, part.n_kv_heads, part.head_dim) for part in page.parts] == [(1, 2, 16), (1, 2, 32)]
    assert page.places == (LayerPlace(0, 0), LayerPlace(1, 0)) * 2
    assert page.n_bytes == 8 * 4 * config.kv_values_per_token == 2 * 8 * 2 * (16 + 32) * 4


def test_the_memory_of_the_pool_and_the_origin_of_pages(folder: Path) -> None:
    settings = DeviceSettings(
        page_size=8, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, kv_cache_memory_bytes=1 << 20
    )
    executor = CpuExecutor(resolve(str(folder)), settings)
    with open_weights(resolve(str(folder)), load_format="dummy", dtype=torch.float32) as weights:
        page = PageLayout.of(weights.config, 8, torch.float32)
    assert executor.n_pages == (1 << 20) // page.n_bytes
    stored = sum(values.nbytes for part in executor.pool.parts for values in part)
    assert stored == (executor.n_pages + 1) * page.n_bytes
    assert executor.page_origin.layout.count("head_dim") == 2, "files of other shapes are other files"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4; no layer before these"),
        ({"num_kv_shared_layers": 3, "layer_types": [SLIDING, SLIDING, FULL, FULL]}, "K and V for layer 2"),
        ({"per_layer_config": {"9": {"head_dim": 8}}}, "per_layer_config has '9'"),
        ({"per_layer_config": {"1": {"sliding_window": 8}}}, "sliding_window in per_layer_config"),
        ({"per_layer_config": [1]}, "per_layer_config is .* it must be an object"),
        ({"num_global_key_value_heads": 3, "attention_k_eq_v": True}, "not a multiple of num_key_value_heads 3"),
        ({"global_head_dim": 25}, "head_dim 25 is odd"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 9}, "is less than vocab_size 211"),
        ({"enable_moe_block": True}, "it has no num_experts"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        (
            {"rope_parameters": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 2}}},
            "above 0 and at most",
        ),
        ({"rope_parameters": {FULL: {"rope_type": "axial"}}}, "rope type 'axial' is not supported"),
    ],
)
def test_configurations_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(**changes)


def test_each_field_changes_what_is_computed(tmp_path: Path) -> None:
    """So the comparisons with Transformers would notice a field that is not used."""
    save_checkpoint(tmp_path, **OTHERS["gemma4"])
    tokens = random_ids(60, seed=5)
    right = logits_of(tmp_path, tokens)
    for changes in (
        {"attention_k_eq_v": True, "sliding_window": 14},
        {"final_logit_softcapping": None},
        {"rope_parameters": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5}}},
    ):
        with edited_config(tmp_path) as config:
            before = dict(config)
            config.update(changes)
        assert (logits_of(tmp_path, tokens) - right).abs().max() > 1e-3, changes
        with edited_config(tmp_path) as config:
            config.update(before)
