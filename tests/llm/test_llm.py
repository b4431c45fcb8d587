"""Tests of ``LLM``: its outputs and its errors."""

from __future__ import annotations

import gc
import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import radixkv
from radixkv.errors import CheckpointError, ConfigError, ContextLengthExceeded, InvalidRequest, UnsupportedFeature
from radixkv.llm import LLM
from radixkv.llm import llm as engine
from radixkv.runtime.device import factory as executor
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.machine import Machine
from radixkv.runtime.loop import Loop
from radixkv.runtime.step.plan import StepPlan
from radixkv.wire.messages import FromRuntime
from radixkv.wire.sampling import SamplingParams
from support.checkpoints import save_llama
from support.hostile_tokenizers import give_up_soon, splitting

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TEXT = "A farmer has 12 hens, and each of them lays 5 eggs a week. How many eggs does he get in a month?"


def test_text_and_token_ids_are_both_prompts(llm: LLM) -> None:
    by_text, second = llm.generate([TEXT, TEXT + " And in a year?"], GREEDY)
    by_ids, alone = llm.generate([by_text.prompt_token_ids, TEXT], GREEDY)
    assert by_text.prompt == TEXT
    assert by_ids.prompt is None
    assert by_ids.outputs == by_text.outputs == alone.outputs
    assert second.outputs[0].text != by_text.outputs[0].text
    assert len(by_text.outputs[0].token_ids) == 12
    assert by_text.outputs[0].finish_reason == "length"


def test_prompts_may_be_dictionaries_and_salts_separate_their_caches(llm: LLM) -> None:
    llm.flush_cache()
    plain, by_name, by_ids = llm.generate([TEXT, {"prompt": TEXT}, {"prompt_token_ids": [5, 6]}], GREEDY)
    assert by_name.prompt == TEXT
    assert by_name.outputs == plain.outputs
    assert by_ids.prompt_token_ids == [5, 6]
    (salted,) = llm.generate({"prompt": TEXT, "cache_salt": "a"}, GREEDY)
    (again,) = llm.generate({"prompt": TEXT, "cache_salt": "a"}, GREEDY)
    (unsalted,) = llm.generate({"prompt": TEXT, "cache_salt": None}, GREEDY)
    assert (salted.num_cached_tokens, salted.outputs) == (0, plain.outputs)
    assert again.num_cached_tokens > 0
    assert unsalted.num_cached_tokens > 0
    (ids,) = llm.generate([5, 6], GREEDY)
    assert ids.outputs == by_ids.outputs


def test_a_stream_grows_to_what_generate_gives(llm: LLM) -> None:
    """Penalties have no drafts, so that each token is an event of its own."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, presence_penalty=0.01)
    (whole,) = llm.generate(TEXT, params)
    outputs = list(llm.stream(TEXT, params))
    assert outputs[-1].outputs == whole.outputs
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    texts = [output.outputs[0].text for output in outputs]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert len(set(texts)) > 6


@pytest.mark.parametrize(
    "settings",
    [
        {"logprobs": 2, "prompt_logprobs": 1},
        {"n": 3, "temperature": 1.0, "seed": 5, "logprobs": 0},
        {"n": 2, "temperature": 1.0, "seed": 5, "stop_token_ids": [5], "logit_bias": {5: 8}, "min_tokens": 3},
        {"n": 3, "temperature": 1.0, "seed": 5, "stop": ["e", "a"]},
    ],
)
def test_a_streamed_answer_equals_one_that_is_not(llm: LLM, settings: dict[str, Any]) -> None:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **settings})
    streamed = list(llm.stream(TEXT, sampling))[-1]
    (whole,) = llm.generate(TEXT, sampling)
    assert whole.outputs == streamed.outputs
    assert whole.prompt_logprobs == streamed.prompt_logprobs
    assert len({tuple(output.token_ids) for output in whole.outputs}) == sampling.n


def test_a_stream_that_is_closed_ends_the_answer(llm: LLM) -> None:
    answer = llm.stream(TEXT, SamplingParams(max_tokens=500, ignore_eos=True))
    for output in answer:
        if output.outputs[0].token_ids:
            break
    assert llm.get_metrics().n_running == 1
    answer.close()
    assert llm.get_metrics().n_running == 0
    assert list(llm.stream(TEXT, GREEDY))[-1].finished


def test_settings_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in (1, 2, 3)]
    outputs = llm.generate([TEXT] * 3, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    with pytest.raises(InvalidRequest, match="3 sampling_params for 2 prompts"):
        llm.generate([TEXT] * 2, params)
    with pytest.raises(InvalidRequest, match="2 priority for 1 prompts"):
        llm.generate([TEXT], GREEDY, priority=[1, 2])


def test_more_prompts_than_the_queue_holds(sensitive: Path) -> None:
    llm = LLM(sensitive, max_total_tokens=4096, max_model_len=1024, max_queued_requests=2)
    outputs = llm.generate([[7, 8, n] for n in range(9)], SamplingParams(temperature=0.0, max_tokens=2))
    llm.shutdown()
    assert [output.prompt_token_ids[2] for output in outputs] == list(range(9))


@pytest.mark.parametrize(
    ("prompt", "error", "word"),
    [
        ([], InvalidRequest, "empty"),
        ([1, 10**9], InvalidRequest, "token id 1000000000"),
        ([1, -1], InvalidRequest, "token id -1"),
        ([1, 1 << 40], InvalidRequest, "int32"),
        (["a"], InvalidRequest, "int32"),
        ([5] * 1024, ContextLengthExceeded, "1024 tokens"),
    ],
)
def test_a_bad_prompt_is_refused_and_leaves_nothing_behind(
    llm: LLM, prompt: list[int], error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word):
        llm.generate([TEXT, prompt], GREEDY)
    llm.generate(TEXT, GREEDY)
    metrics = llm.get_metrics()
    assert (metrics.n_running, metrics.n_waiting) == (0, 0)
    assert metrics.n_pages_free + metrics.n_pages_evictable == metrics.n_pages


def test_settings_of_other_engines_without_effect_are_accepted_on_the_cpu(llm: LLM, sensitive: Path) -> None:
    neutral = {
        "tensor_parallel_size": 1,
        "trust_remote_code": False,
        "quantization": None,
        "kv_cache_dtype": "auto",
        "enable_chunked_prefill": True,
        "disable_log_stats": True,
    }
    sampling = SamplingParams(temperature=0.0, max_tokens=4)
    (expected,) = llm.generate(TEXT, sampling)
    again = LLM(sensitive, device="cpu", dtype=torch.float32, max_total_tokens=4096, enforce_eager=True, **neutral)
    (answer,) = again.generate(TEXT, sampling)
    assert answer.outputs[0].token_ids == expected.outputs[0].token_ids


def test_settings_under_the_names_of_vllm_and_sglang(llm: LLM, sensitive: Path) -> None:
    (expected,) = llm.generate(TEXT, GREEDY)
    vllm = LLM(model=str(sensitive), device="cpu", block_size=8, gpu_memory_utilization=0.90, max_total_tokens=4096)
    sglang = LLM(
        model_path=str(sensitive),
        tokenizer_path=str(sensitive),
        device="cpu",
        context_length=200,
        max_running_requests=4,
        chunked_prefill_size=64,
        max_total_tokens=4096,
        mem_fraction_static=0.8,
        random_seed=3,
        scheduling_policy="fcfs",
        disable_radix_cache=True,
        disable_cuda_graph=True,
    )
    assert sglang.max_model_len == 200
    for other, hits in ((vllm, True), (sglang, False)):
        (cold,), (warm,) = other.generate(TEXT, GREEDY), other.generate(TEXT, GREEDY)
        assert cold.outputs[0].token_ids == warm.outputs[0].token_ids == expected.outputs[0].token_ids
        assert (warm.num_cached_tokens > 0) is hits
        other.shutdown()


def test_interrupted_calls_leave_nothing_to_the_next_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the garbage collector on during a call, or off after it."""
    (before,) = llm.generate(TEXT, GREEDY)
    turn, launch, seen = Loop.turn, CpuExecutor.launch, []

    def interrupted_turn(loop: Loop) -> list[FromRuntime]:
        seen.append(gc.isenabled())
        if len(seen) == 3:
            raise KeyboardInterrupt
        return turn(loop)

    def interrupted_launch(executor: CpuExecutor, plan: StepPlan) -> object:
        signal.raise_signal(signal.SIGINT)
        return launch(executor, plan)

    for owner, name, interrupted in ((Loop, "turn", interrupted_turn), (CpuExecutor, "launch", interrupted_launch)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([TEXT] * 3, GREEDY)
        assert gc.isenabled()
        assert llm.get_metrics().n_running == 0
        assert llm.generate(TEXT, GREEDY)[0].outputs == before.outputs
    assert seen == [False] * 3


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"model": "no-such-folder/"}, CheckpointError, "no-such-folder"),
        ({"page_size": 0}, ConfigError, "page_size 0"),
        ({"max_model_len": 100_000}, ConfigError, "max_model_len 100000"),
        ({"load_format": "gguf"}, ConfigError, "load_format 'gguf'"),
        ({"chat_template": "/no-such-file"}, CheckpointError, "no-such-file"),
        ({"enforce_eager": "yes"}, ConfigError, "enforce_eager 'yes'"),
        (
            {"gpu_memory_utilization": 0.5, "mem_fraction_static": 0.5},
            ConfigError,
            "gpu_memory_utilization .*mem_fraction_static",
        ),
        ({"tensor_parallel_size": True}, ConfigError, "^tensor_parallel_size True "),
        (
            {"pipeline_parallel_size": 2},
            UnsupportedFeature,
            "^pipeline_parallel_size 2 .*by --tensor-parallel-size alone",
        ),
        ({"trust_remote_code": True}, UnsupportedFeature, "^trust_remote_code True "),
        ({"max_model_length": 256}, UnsupportedFeature, r"max_model_length.* max_model_len\b"),
        ({"tp_size": 0}, ConfigError, "^tp_size 0 "),
        (
            {"tensor_parallel_size": 1, "swap_space": None, "hf_overrides": {}, "nothing": None},
            UnsupportedFeature,
            "hf_overrides, nothing",
        ),
        ({"dtype": "float8"}, ConfigError, "dtype 'float8'"),
        ({"block_size": 0}, ConfigError, "^block_size 0 "),
        ({"block_size": 16, "page_size": 16}, ConfigError, "page_size and block_size "),
        ({"model": "tiny", "model_path": "tiny"}, ConfigError, "model and model_path "),
        ({"mem_fraction_static": 1.5}, ConfigError, "^mem_fraction_static 1.5 "),
        ({"context_length": 100_000}, ConfigError, "^context_length 100000 "),
        ({"random_seed": -1}, ConfigError, "^random_seed -1 "),
        ({"model_path": ""}, ConfigError, "^model_path is ''"),
        ({"disable_radix_cache": "yes"}, ConfigError, "^disable_radix_cache 'yes' "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_name_the_setting_as_it_was_given(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(**settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([5], "prompts is 5"),
        ([], "prompts is None"),
        ([[TEXT], ["hot"]], r"sampling_params is \['hot'\]"),
        ([[{"prompt": TEXT, "images": []}]], "a prompt has .*'images'"),
        ([{"prompt": TEXT, "prompt_token_ids": [1]}], "prompt .*prompt_token_ids"),
        ([{"prompt": TEXT, "cache_salt": 5}], "cache_salt is 5"),
        ([b"abcd"], "decode it to text"),
        ([[b"abcd"]], "decode it to text"),
        ([[bytearray(b"abcd")]], "decode it to text"),
        ([{"prompt": b"abcd"}], "decode it to text"),
    ],
    ids=str,
)
def test_errors_name_the_wrong_argument(llm: LLM, arguments: list[Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(*arguments)


def test_a_checkpoint_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    save_llama(tmp_path)
    llm = LLM(str(tmp_path), max_total_tokens=256)
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, seed=1, ignore_eos=True))
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 3)
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        llm.generate(TEXT)


def test_calls_accept_neutral_arguments_of_vllm_and_reject_others_by_name(llm: LLM) -> None:
    (alone,) = llm.generate(TEXT, GREEDY)
    (beside,) = llm.generate(TEXT, GREEDY, lora_request=None, prompt_token_ids=None)
    assert beside.outputs == alone.outputs
    with pytest.raises(UnsupportedFeature, match=r"prompt_adapter_request 'mine' .*no prompt adapters"):
        llm.generate(TEXT, GREEDY, prompt_adapter_request="mine")
    with pytest.raises(UnsupportedFeature, match="prompt_token_ids .* prompts"):
        llm.generate(prompt_token_ids=[[1, 2]], sampling_params=GREEDY)
    with pytest.raises(UnsupportedFeature, match=r"max_tokens.* SamplingParams\(max_tokens=...\)"):
        llm.generate(TEXT, max_tokens=5)
    with pytest.raises(UnsupportedFeature, match=r"priorities.* priority\b"):
        llm.generate(TEXT, GREEDY, priorities=[1])
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(UnsupportedFeature, match=r"LLM.chat .*template_kwargs.* chat_t"):
        llm.chat(messages, GREEDY, template_kwargs={})
    with pytest.raises(UnsupportedFeature, match=r"temperature.* SamplingParams\(temperature=...\)"):
        llm.chat(messages, temperature=0.5)
    with pytest.raises(UnsupportedFeature, match="chat_template .* LLM"):
        llm.chat(messages, GREEDY, tools=None, chat_template="{{ messages }}")


def test_the_package_loads_its_names_lazily() -> None:
    assert radixkv.LLM is LLM
    assert radixkv.SamplingParams is SamplingParams
    with pytest.raises(AttributeError, match="nothing"):
        _ = radixkv.nothing


def test_a_call_during_a_stream_is_rejected_and_the_stream_continues(llm: LLM) -> None:
    (whole,) = llm.generate(TEXT, GREEDY)
    stream = llm.stream(TEXT, GREEDY)
    next(stream)
    with pytest.raises(ConfigError, match="answering another call"):
        llm.generate("one", GREEDY)
    assert list(stream)[-1].outputs == whole.outputs


@pytest.mark.nightly
def test_the_prompt_with_the_lowest_priority_goes_first(sensitive: Path) -> None:
    llm = LLM(sensitive, device="cpu", max_total_tokens=4096, max_model_len=256, max_num_seqs=1)
    priorities = [5] * 200
    priorities[150], priorities[190] = -1, 0
    outputs = llm.generate([TEXT] * 200, SamplingParams(max_tokens=1), priority=priorities)
    assert [index for index, output in enumerate(outputs) if output.num_cached_tokens == 0] == [150]


def test_a_missing_device_is_reported_before_a_checkpoint_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fetched(Exception):
        pass

    def resolve(*args: object, **options: object) -> None:
        raise Fetched

    def inspect_machine() -> Machine:
        return Machine("2.11.0", (13, 0), None, None, "", {}, False, None, None, None, has_python_headers=True)

    monkeypatch.setattr(engine, "resolve", resolve)
    monkeypatch.setattr(executor, "inspect_machine", inspect_machine)
    with pytest.raises(ConfigError, match="no NVIDIA driver"):
        LLM("some/model", device="cuda")
    with pytest.raises(Fetched):
        LLM("some/model", device="cpu")


def test_a_text_that_the_tokenizer_cannot_encode_is_an_error_and_the_next_one_is_answered(
    sensitive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up_soon(monkeypatch)
    splitting(r"a*x|.").save(str(tmp_path / "tokenizer.json"))
    hostile = LLM(sensitive, tokenizer=tmp_path, max_total_tokens=4096, max_model_len=1024)
    with pytest.raises(InvalidRequest, match="cannot encode the text"):
        hostile.generate("a" * 100_000, GREEDY)
    (output,) = hostile.generate("b", GREEDY)
    assert len(output.outputs[0].token_ids) == 12
    hostile.shutdown()
