"""Answers with adapters equal those of merged models, and share no pages with other adapters or the model alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv import LLM, BeamSearchParams, LoRARequest, RequestOutput, SamplingParams
from radixkv.checkpoints import resolve
from radixkv.errors import CheckpointError, ConfigError, InvalidRequest
from support.cases import rest_nightly
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, HYBRIDS, load_oracle, random_ids
from support.lora import ATTENTION, linear_modules, merge, save_adapter

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
PROMPT = random_ids(70, seed=1)
FAMILIES = ("grouped", "qwen3.5-attention", "opt")
"""Names of checkpoints that together cover products and MLPs of each kind."""
SQL, LAW = LoRARequest("sql"), LoRARequest("law")


def opened(folder: Path, **settings: Any) -> LLM:
    defaults = {"dtype": "float32", "max_model_len": 512, "max_total_tokens": 4096}
    return LLM(folder, device="cpu", **{**defaults, **settings})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAMILIES else pytest.mark.nightly)
        for name in (*CHECKPOINTS, *(one for one in HYBRIDS if one.startswith("qwen")))
    ],
)
def test_answers_are_those_of_the_merged_model(name: str, tmp_path: Path) -> None:
    """A prompt of 330 tokens is more than an MLP computes at once."""
    save_checkpoint(tmp_path / "base", **(CHECKPOINTS | HYBRIDS)[name])
    oracle = load_oracle(resolve(str(tmp_path / "base")))
    folder = save_adapter(tmp_path / "sql", oracle, linear_modules(oracle), seed=2)
    params = SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=5, ignore_eos=True)
    ids = random_ids(330, seed=3)
    with opened(tmp_path / "base", lora_modules={"sql": folder}) as llm:
        (alone,), (adapted,) = (
            llm.generate([ids], params, use_tqdm=False, lora_request=request) for request in (None, SQL)
        )
    tolerance = 2e-4 if name in CHECKPOINTS else 2e-3  # the delta nets' own rounding
    without = worst_difference(oracle, ids, alone)
    assert without < tolerance
    assert worst_difference(oracle, ids, adapted) > 0.1, "the adapter changes something"
    assert worst_difference(merge(oracle, folder), ids, adapted) < tolerance


def worst_difference(oracle: torch.nn.Module, ids: Sequence[int], output: RequestOutput) -> float:
    """Returns how far the prompt's logprobs are from the oracle's, and checks that its tokens are the likeliest."""
    answer = list(output.outputs[0].token_ids)
    with torch.inference_mode():
        logprobs = oracle(torch.tensor([[*ids, *answer]])).logits[0].log_softmax(-1)
    differences = [
        abs(one.logprob - logprobs[position - 1, token].item())
        for position, row in enumerate(output.prompt_logprobs or ())
        for token, one in (row or {}).items()
    ]
    worst = max(differences)
    if worst < 0.01:
        assert answer == logprobs[len(ids) - 1 : -1].argmax(-1).tolist()
    return worst


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two adapters of it with other ranks and modules, and one with the bytes of the first."""
    folder = tmp_path_factory.mktemp("adapters")
    save_checkpoint(folder / "base")
    oracle = load_oracle(resolve(str(folder / "base")))
    save_adapter(folder / "sql", oracle, linear_modules(oracle), seed=2)
    save_adapter(folder / "law", oracle, linear_modules(oracle, {"q_proj", "down_proj"}), seed=3, rank=7)
    shutil.copytree(folder / "sql", folder / "copy")
    return folder


def modules(folders: Path, *names: str) -> dict[str, Path]:
    return {name: folders / name for name in names or ("sql", "law", "copy")}


@pytest.fixture
def llm(folders: Path) -> Iterator[LLM]:
    with opened(folders / "base", lora_modules=modules(folders)) as llm:
        yield llm


def cold(llm: LLM, prompt: Sequence[int], request: LoRARequest | None, params: SamplingParams = PARAMS) -> Any:
    llm.flush_cache()
    (output,) = llm.generate([list(prompt)], params, use_tqdm=False, lora_request=request)
    assert output.num_cached_tokens == 0
    return output.outputs


def test_a_batch_of_base_and_adapters_equals_each_alone(folders: Path) -> None:
    """To the last bit, in chunks of prompts and in steps with different rows."""
    prompts = [random_ids(n, seed=n) for n in (40, 61, 33, 90, 5, 47)]
    requests = [None, SQL, LAW, SQL, None, LAW]
    with opened(folders / "base", lora_modules=modules(folders), max_num_batched_tokens=64, max_num_seqs=8) as llm:
        alone = [cold(llm, prompt, request) for prompt, request in zip(prompts, requests, strict=True)]
        llm.flush_cache()
        together = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=requests)
    assert [output.outputs for output in together] == alone


def test_pages_are_shared_only_by_equal_adapters(llm: LLM) -> None:
    expected = {request: cold(llm, PROMPT, request) for request in (None, SQL, LAW)}
    assert len({str(outputs) for outputs in expected.values()}) == 3
    llm.flush_cache()
    for request in (SQL, None, LAW):
        (first,) = llm.generate([PROMPT], PARAMS, use_tqdm=False, lora_request=request)
        assert (first.num_cached_tokens, first.outputs) == (0, expected[request])
    for request in (None, LAW, SQL, LoRARequest("copy")):
        (again,) = llm.generate([PROMPT], PARAMS, use_tqdm=False, lora_request=request)
        same = SQL if request == LoRARequest("copy") else request
        assert (again.num_cached_tokens, again.outputs) == (64, expected[same])


def test_explain_names_another_adapter(llm: LLM) -> None:
    llm.flush_cache()
    llm.generate([PROMPT], PARAMS, use_tqdm=False, lora_request=SQL)
    explained = llm.explain(PROMPT)
    assert (explained.reason, explained.n_cached) == ("other_namespace", 0)
    sql = next(adapter for adapter in llm._open_loop.ready.adapters if adapter.name == "sql")
    assert explained.adapter_elsewhere == sql.digest
    assert llm.explain(PROMPT, lora_request=LoRARequest("copy")).n_cached == 64
    assert llm.explain(PROMPT, cache_salt="s").adapter_elsewhere is None, "it is another salt, too"


def test_pins_and_invalidation_are_of_an_adapter(llm: LLM) -> None:
    llm.flush_cache()
    for request in (None, SQL):
        llm.generate([PROMPT], PARAMS, use_tqdm=False, lora_request=request)
    assert llm.pin_cache(PROMPT, lora_request=SQL).n_pinned == 64
    assert (llm.explain(PROMPT).n_pinned, llm.explain(PROMPT, lora_request=SQL).n_pinned) == (0, 64)
    llm.pin_cache(PROMPT, 0.0, lora_request=SQL)
    llm.invalidate_cache(PROMPT[:64], lora_request=SQL)
    assert llm.explain(PROMPT, lora_request=SQL).n_cached < 64
    assert llm.explain(PROMPT).n_cached == 64


@pytest.mark.parametrize("by_prompt", rest_nightly([True, False], kept=(0,)))
def test_an_invalidation_means_all_adapters_in_all_tiers(folders: Path, tmp_path: Path, by_prompt: bool) -> None:
    """Of one tenant and salt; a request for an adapter means that one alone."""
    settings = {"host_memory": "4MiB", "cache_dir": tmp_path}
    prompt = PROMPT[:64] if by_prompt else None
    everyone = (None, SQL, LAW)
    with opened(folders / "base", lora_modules=modules(folders), **settings) as llm:

        def cached(salt: str = "s") -> list[int]:
            explained = [llm.explain(PROMPT, cache_salt=salt, lora_request=request) for request in everyone]
            return [one.n_cached + one.n_in_host + one.n_on_disk for one in explained]

        for salt in ("s", "other"):
            for request in everyone:
                salted = {"prompt_token_ids": PROMPT, "cache_salt": salt}
                llm.generate([salted], PARAMS, use_tqdm=False, lora_request=request)
        before = cached()
        assert min(before) >= 64
        assert llm.invalidate_cache(prompt, cache_salt="s", lora_request=SQL).n_on_device > 0
        assert cached() == [before[0], 0, before[2]]
        dropped = llm.invalidate_cache(prompt, cache_salt="s")
        assert dropped.n_on_device > 0
        assert dropped.n_in_host is not None
        assert cached() == [0, 0, 0]
        assert min(cached("other")) >= 64
    with opened(folders / "base", lora_modules=modules(folders), **settings) as llm:
        assert cached() == [0, 0, 0]


def test_choices_and_beams_of_an_adapter(llm: LLM) -> None:
    sampled = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, logprobs=1)
    expected = cold(llm, PROMPT, SQL, sampled)
    both = llm.generate([PROMPT, PROMPT], sampled, use_tqdm=False, lora_request=[LAW, SQL])
    assert both[1].outputs == expected
    beams = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    (alone,) = llm.beam_search([PROMPT], beams, lora_request=SQL)
    llm.flush_cache()
    mixed = llm.beam_search([PROMPT, PROMPT], beams, lora_request=[None, SQL])
    assert mixed[1].sequences == alone.sequences != mixed[0].sequences


@pytest.mark.nightly
def test_preempted_answers_go_on_with_their_adapter(folders: Path) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=1)
    prompts = [random_ids(40, seed=n) for n in range(4)]
    requests = [SQL, None, LAW, SQL]
    settings = {"max_total_tokens": 256, "max_model_len": 128, "num_reserved_decode_tokens": 0}
    with opened(folders / "base", lora_modules=modules(folders), **settings) as llm:
        alone = [cold(llm, prompt, request, long) for prompt, request in zip(prompts, requests, strict=True)]
        llm.flush_cache()
        together = llm.generate(prompts, long, use_tqdm=False, lora_request=requests)
        assert llm.get_metrics().preemptions_total > 0
    assert [output.outputs for output in together] == alone


@pytest.mark.nightly
def test_drafts_of_an_adapter_change_no_answer(folders: Path) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    prompt = PROMPT[:20] * 4
    answers = []
    for speculative in ("off", {"method": "tree", "num_speculative_tokens": 4}):
        with opened(folders / "base", lora_modules=modules(folders), speculative_config=speculative) as llm:
            outputs = [
                llm.generate([prompt], long, use_tqdm=False, lora_request=request)[0].outputs[0].token_ids
                for request in (None, SQL, SQL, LAW, None)
            ]
            answers.append([list(tokens) for tokens in outputs])
    assert answers[0] == answers[1]


def test_lower_tiers_keep_the_pages_of_each_adapter(folders: Path, tmp_path: Path) -> None:
    """After a restart, too, where another adapter has the name of the first one."""
    tiers = {"host_memory_bytes": 1 << 24, "cache_dir": tmp_path / "disk", "load_policy": "always"}
    with opened(folders / "base", lora_modules=modules(folders, "sql", "law"), **tiers) as llm:
        expected = {one: cold(llm, PROMPT, one) for one in (None, SQL, LAW)}
        llm.flush_cache()
        for request in (None, SQL):
            llm.generate([PROMPT], PARAMS, use_tqdm=False, lora_request=request)
    renamed = {"sql": folders / "law", "law": folders / "sql"}
    with opened(folders / "base", lora_modules=renamed, **tiers) as llm:
        (other,) = llm.generate([PROMPT], PARAMS, use_tqdm=False, lora_request=SQL)
        (same,) = llm.generate([PROMPT], PARAMS, use_tqdm=False, lora_request=LAW)
        (base,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    assert (other.num_cached_tokens, other.outputs) == (0, expected[LAW]), "its bytes were never computed"
    assert (same.num_fetched_tokens, same.outputs) == (64, expected[SQL])
    assert (base.num_fetched_tokens, base.outputs) == (64, expected[None])


def test_states_of_recurrent_layers_are_of_an_adapter(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "base", **HYBRIDS["qwen3.5"])
    oracle = load_oracle(resolve(str(tmp_path / "base")))
    for seed, name in enumerate(("sql", "law")):
        save_adapter(tmp_path / name, oracle, linear_modules(oracle), seed=seed)
    first = random_ids(150, seed=8)
    with opened(tmp_path / "base", lora_modules=modules(tmp_path, "sql", "law")) as llm:
        (turn,) = llm.generate([first], PARAMS, use_tqdm=False, lora_request=SQL)
        second = [*first, *turn.outputs[0].token_ids, *random_ids(20, seed=9)]
        (warm,) = llm.generate([second], PARAMS, use_tqdm=False, lora_request=SQL)
        (other,) = llm.generate([second], PARAMS, use_tqdm=False, lora_request=LAW)
        assert warm.num_cached_tokens >= 128
        assert other.num_cached_tokens == 0
        assert warm.outputs == cold(llm, second, SQL)
        assert other.outputs == cold(llm, second, LAW)


def test_stream_and_chats_take_an_adapter(llm: LLM) -> None:
    expected = cold(llm, PROMPT, SQL)
    *_, last = llm.stream(PROMPT, PARAMS, lora_request=SQL)
    assert last.outputs == expected


def test_rank_stabilized_adapters_and_bfloat16(folders: Path, tmp_path: Path) -> None:
    oracle = load_oracle(resolve(str(folders / "base")))
    folder = save_adapter(tmp_path / "rs", oracle, linear_modules(oracle, ATTENTION), seed=5, use_rslora=True)
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=5, ignore_eos=True)
    with opened(folders / "base", lora_modules={"sql": folder}) as llm:
        (exact,) = llm.generate([PROMPT], params, use_tqdm=False, lora_request=SQL)
    with opened(folders / "base", lora_modules={"sql": folder}, dtype="bfloat16") as llm:
        (rounded,) = llm.generate([PROMPT], params, use_tqdm=False, lora_request=SQL)
    without = worst_difference(oracle, PROMPT, rounded)
    assert worst_difference(merge(oracle, folder), PROMPT, exact) < 2e-4
    assert worst_difference(oracle, PROMPT, rounded) < without / 4


def test_requests_for_unknown_adapters_are_refused(llm: LLM, folders: Path) -> None:
    with pytest.raises(InvalidRequest, match="'math', which is not loaded; .*'sql', 'law', 'copy'"):
        llm.generate([PROMPT], PARAMS, lora_request=LoRARequest("math", 1))
    with pytest.raises(InvalidRequest, match=r"'sql' in '/other'.* give that folder"):
        llm.generate([PROMPT], PARAMS, lora_request=LoRARequest("sql", 1, "/other"))
    with pytest.raises(InvalidRequest, match="2 lora_request for 1 prompts"):
        llm.generate([PROMPT], PARAMS, lora_request=[SQL, None])
    with pytest.raises(InvalidRequest, match="lora_request is 'sql'; give one of type LoRARequest"):
        llm.generate([PROMPT], PARAMS, lora_request="sql")
    (output,) = llm.generate([PROMPT], PARAMS, lora_request=LoRARequest("sql", 1, str(folders / "sql")))
    assert output.outputs == cold(llm, PROMPT, SQL)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        (
            {"lora_modules": {"a": "x", "b": "y"}, "max_cpu_loras": 1},
            ConfigError,
            "max_cpu_loras 1 is less than the 2",
        ),
        ({"max_loras": 2, "max_cpu_loras": 1}, ConfigError, "max_cpu_loras 1 is less than max_loras 2"),
        ({"max_lora_rank": 129}, ConfigError, "max_lora_rank 129 must be at most 128"),
        ({"max_lora_rank": 3}, CheckpointError, "adapter 'sql': .* rank 4, above the limit of 3"),
        ({"lora_modules": ["a=x", "a=y"]}, ConfigError, "lora_modules has two adapters of the name 'a'"),
        ({"lora_modules": ["=x"]}, ConfigError, "lacks a name or a folder"),
        ({"lora_modules": {"a": "/nowhere"}}, CheckpointError, "adapter 'a': /nowhere"),
        ({"task": "embed"}, ConfigError, "adapters only generate"),
    ],
)
def test_engines_without_adapters_say_so(
    folders: Path, settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        opened(folders / "base", **{"lora_modules": modules(folders, "sql"), **settings})
