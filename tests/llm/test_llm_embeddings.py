"""Tests of ``LLM.embed`` against Transformers, with the pooling of sentence-transformers written out in torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from radixkv import EmbeddingRequestOutput, SamplingParams
from radixkv.errors import (
    CheckpointError,
    ContextLengthExceeded,
    InvalidRequest,
    NumericalFailure,
    UnsupportedFeature,
)
from radixkv.llm import LLM
from support.checkpoints import edited_config, edited_tensors, save_checkpoint
from support.device_support import OTHERS, random_ids
from support.small_tokenizers import byte_level

LENGTHS = (1, 5, 16, 17, 64, 200)
SIZES: dict[str, Any] = {"max_total_tokens": 2048, "max_model_len": 512, "device": "cpu"}


def oracle(folder: Path, prompts: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the last token's last hidden states with length 1, as ``lasttoken`` pooling and ``Normalize`` do."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        states = [model.model(torch.tensor([ids])).last_hidden_state[0, -1].float() for ids in prompts]
    return torch.nn.functional.normalize(torch.stack(states), dim=-1)


def vectors(outputs: Sequence[EmbeddingRequestOutput]) -> Tensor:
    return torch.tensor([output.outputs.embedding for output in outputs])


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_checkpoint(folder, model_type="qwen3")
    return folder


@pytest.mark.parametrize("name", ["qwen3-biased", "mistral", "gemma3", "opt"])
def test_embeddings_are_the_last_states_of_transformers(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **OTHERS[name])
    prompts = [random_ids(n, seed=n) for n in LENGTHS]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        states = [model.base_model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in prompts]
    with LLM(tmp_path, task="embed", **SIZES) as llm:
        found = vectors(llm.embed(prompts, use_tqdm=False))
    torch.testing.assert_close(found, torch.nn.functional.normalize(torch.stack(states), dim=-1), rtol=0, atol=2e-5)


def test_batches_chunks_and_hits_have_equal_bits(qwen3: Path) -> None:
    prompts = [random_ids(n, seed=n) for n in LENGTHS]
    prompts += [prompts[-1][:n] for n in (80, 81, 150)]
    with LLM(qwen3, task="embed", max_num_batched_tokens=48, max_num_seqs=8, **SIZES) as llm:
        cold = llm.embed(prompts, use_tqdm=False)
        warm = llm.embed(prompts, use_tqdm=False)
        counted = llm.get_metrics()
        alone = []
        for ids in prompts:
            llm.flush_cache()
            alone += llm.embed(ids, use_tqdm=False)
    assert vectors(cold).equal(vectors(alone))
    assert vectors(warm).equal(vectors(alone))
    assert [output.num_cached_tokens for output in alone] == [0] * len(prompts)
    assert [output.num_cached_tokens for output in warm][-4:] == [192, 79, 80, 149]
    assert [output.prompt_token_ids for output in cold] == prompts
    assert (counted.prompt_tokens_total, counted.generation_tokens_total) == (2 * sum(map(len, prompts)), 0)
    torch.testing.assert_close(vectors(alone), oracle(qwen3, prompts), rtol=0, atol=2e-6)


def test_bfloat16_is_as_near_to_float32_as_transformers_is(qwen3: Path) -> None:
    prompts = [random_ids(n, seed=n) for n in LENGTHS]
    exact, other = oracle(qwen3, prompts), oracle(qwen3, prompts, torch.bfloat16)
    with LLM(qwen3, task="embed", dtype="bfloat16", **SIZES) as llm:
        found = vectors(llm.embed(prompts, use_tqdm=False))
    assert (found - exact).norm(dim=-1).max() < 1.5 * (other - exact).norm(dim=-1).max()
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(len(prompts)))


def test_a_text_ends_with_what_the_tokenizer_appends(qwen3: Path, tmp_path: Path) -> None:
    """As with Qwen3-Embedding, whose tokenizer appends an end token: its state is the embedding."""
    tokenizer = byte_level()
    end = tokenizer.get_vocab_size() - 1
    tokenizer.post_processor = TemplateProcessing("$A [END]", special_tokens=[("[END]", end)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    save_checkpoint(tmp_path, model_type="qwen3", vocab_size=tokenizer.get_vocab_size())
    with LLM(tmp_path, task="embed", **SIZES) as llm:
        (output,) = llm.embed("hens and eggs", use_tqdm=False)
    ids = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("hens and eggs").ids
    assert output.prompt_token_ids == ids
    assert ids[-1] == end
    torch.testing.assert_close(vectors([output]), oracle(tmp_path, [ids]), rtol=0, atol=2e-6)


def test_dimensions_keep_the_leading_values_and_length_one(qwen3: Path) -> None:
    ids = random_ids(30, seed=3)
    with LLM(qwen3, task="embed", **SIZES) as llm:
        found = vectors(llm.embed([ids], use_tqdm=False, dimensions=8))
        for wrong in (0, 49):
            with pytest.raises(InvalidRequest, match=f"dimensions is {wrong}") as refused:
                llm.embed(ids, use_tqdm=False, dimensions=wrong)
            assert refused.value.param == "dimensions"
    expected = torch.nn.functional.normalize(oracle(qwen3, [ids])[:, :8], dim=-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_a_model_without_a_head_can_embed(tmp_path: Path) -> None:
    """As those of Qwen3-Embedding are saved: without a prefix of names, and of 8B without a head."""
    save_checkpoint(tmp_path / "whole", model_type="qwen3")
    AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "headless")
    ids = random_ids(40, seed=4)
    found = []
    for name, architecture in (("whole", None), ("headless", None), ("headless", "Qwen3ForCausalLM")):
        if architecture is not None:
            with edited_config(tmp_path / name) as config:
                assert config["architectures"] == ["Qwen3Model"]
                config["architectures"] = [architecture]
        with LLM(tmp_path / name, task="embed", **SIZES) as llm:
            found.append(vectors(llm.embed(ids, use_tqdm=False)))
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])
    with pytest.raises(CheckpointError, match=r"lacks lm_head.weight; .*--task embed"):
        LLM(tmp_path / "headless", **SIZES)
    with edited_config(tmp_path / "headless") as config:
        config["architectures"] = ["Qwen3Model"]
    with pytest.raises(CheckpointError, match=r"'Qwen3Model' is not supported.*--task embed"):
        LLM(tmp_path / "headless", **SIZES)


def test_a_prompt_may_fill_the_context_and_not_exceed_it(qwen3: Path) -> None:
    with LLM(qwen3, task="embed", max_total_tokens=128, max_model_len=256, device="cpu") as llm:
        ids = random_ids(128, seed=5)
        (output,) = llm.embed(ids, use_tqdm=False)
        torch.testing.assert_close(vectors([output]), oracle(qwen3, [ids]), rtol=0, atol=2e-6)
        with pytest.raises(ContextLengthExceeded, match="128 tokens"):
            llm.embed(random_ids(129, seed=5), use_tqdm=False)
    with LLM(qwen3, task="embed", max_total_tokens=512, max_model_len=64, device="cpu") as llm:
        llm.embed(random_ids(64, seed=5), use_tqdm=False)
        with pytest.raises(ContextLengthExceeded, match="64 tokens"):
            llm.embed(random_ids(65, seed=5), use_tqdm=False)


def test_each_task_refuses_the_calls_of_others(qwen3: Path) -> None:
    with LLM(qwen3, task="embed", **SIZES) as llm:
        for call in (
            lambda: llm.generate([1, 2], SamplingParams(), use_tqdm=False),
            lambda: next(llm.stream([1, 2])),
        ):
            with pytest.raises(InvalidRequest, match="task='generate'"):
                call()
            with pytest.raises(InvalidRequest, match="task='generate'"):
                llm.chat([{"role": "user", "content": "hi"}])  # not the missing template
    with LLM(qwen3, **SIZES) as llm, pytest.raises(InvalidRequest, match="task='embed'"):
        llm.embed([1, 2], use_tqdm=False)


def test_settings_of_vllm_are_refused_by_name_unless_they_ask_for_nothing(qwen3: Path) -> None:
    with LLM(qwen3, task="embed", **SIZES) as llm:
        for name, value in (
            ("truncate_prompt_tokens", 4),
            ("pooling_params", object()),
            ("lora_request", "a"),
            ("normalize", False),
            ("instruction", "Find it."),
            ("tokenization_kwargs", {"a": 1}),
            ("nonsense", 1),
        ):
            with pytest.raises(UnsupportedFeature, match=name):
                llm.embed([1, 2], use_tqdm=False, **{name: value})
        nothing = {"pooling_params": None, "lora_request": None, "normalize": True}
        (plain,), (other,) = llm.embed([1, 2], use_tqdm=False), llm.embed([1, 2], use_tqdm=False, **nothing)  # type: ignore[arg-type]
        for wrong in ("8", 1.5, True):
            with pytest.raises(InvalidRequest, match="dimensions is"):
                llm.embed([1, 2], use_tqdm=False, dimensions=wrong)  # type: ignore[arg-type]
    assert plain.outputs.embedding == other.outputs.embedding


POOLING = {"word_embedding_dimension": 48, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}
MODULES = ["Transformer", "Pooling", "Normalize"]


def save_modules(folder: Path, modules: Sequence[str], pooling: dict[str, Any]) -> None:
    """Writes the files of sentence-transformers beside a checkpoint."""
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    layout = [
        {
            "idx": i,
            "name": str(i),
            "path": paths.get(name, f"{i}_{name}"),
            "type": f"sentence_transformers.models.{name}",
        }
        for i, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(layout))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_modules_of_sentence_transformers_decide_whether_vectors_have_length_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, model_type="qwen3")
    ids, lengths = random_ids(20, seed=6), []
    for modules in (MODULES, MODULES[:2]):
        save_modules(tmp_path, modules, POOLING)
        with LLM(tmp_path, task="embed", **SIZES) as llm:
            lengths.append(vectors(llm.embed(ids, use_tqdm=False)).norm().item())
    assert lengths[0] == pytest.approx(1)
    assert lengths[1] > 1.5


@pytest.mark.parametrize(
    ("modules", "pooling", "named"),
    [
        (MODULES, {"pooling_mode_mean_tokens": True}, "mean_tokens"),
        (MODULES, {"pooling_mode_cls_token": True}, "cls_token"),
        (MODULES, {"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": True}, "max_tokens"),
        (MODULES, {"pooling_mode": "mean"}, "mean"),
        (MODULES, {}, "mean_tokens"),
        (["Transformer", "Pooling", "Dense"], POOLING, "Dense"),
        (["Transformer"], POOLING, "no Pooling"),
        ([], POOLING, "no Pooling"),
    ],
)
def test_other_pooling_is_refused_by_name(
    modules: Sequence[str], pooling: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, model_type="qwen3")
    save_modules(tmp_path, modules, pooling)
    with pytest.raises(CheckpointError, match=named):
        LLM(tmp_path, task="embed", **SIZES)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ({"is_causal": False}, "is_causal"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_models_that_are_no_decoders_are_refused_by_name(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, model_type="qwen3")
    with edited_config(tmp_path) as config:
        config.update(changes)
    with pytest.raises(CheckpointError, match=named):
        LLM(tmp_path, task="embed", **SIZES)


def test_values_that_are_not_finite_fail_their_request_alone(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, model_type="qwen3")
    with edited_tensors(tmp_path) as tensors:
        tensors["model.embed_tokens.weight"][7] = torch.inf
    with LLM(tmp_path, task="embed", **SIZES) as llm:
        with pytest.raises(NumericalFailure):
            llm.embed([[1, 2, 7, 3]], use_tqdm=False)
        (output,) = llm.embed([[1, 2, 3]], use_tqdm=False)
    torch.testing.assert_close(vectors([output]), oracle(tmp_path, [[1, 2, 3]]), rtol=0, atol=2e-6)


@pytest.mark.nightly
def test_two_ranks_have_the_embeddings_of_one(qwen3: Path) -> None:
    prompts = [random_ids(n, seed=n) for n in LENGTHS]
    with LLM(qwen3, task="embed", tensor_parallel_size=2, **SIZES) as llm:
        found = vectors(llm.embed(prompts, use_tqdm=False))
    torch.testing.assert_close(found, oracle(qwen3, prompts), rtol=0, atol=2e-6)
