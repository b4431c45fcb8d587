"""Tests of ``LLM``: its outputs and its errors."""

from __future__ import annotations

import gc
import itertools
import signal
from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def llm(sensitive: Path) -> Iterator[LLM]:
    llm = LLM(sensitive, max_total_tokens=4096, max_model_len=1024)
    yield llm
    llm.shutdown()


def test_text_and_token_ids_are_both_prompts(llm: LLM) -> None:
    by_text, second = llm.generate([TEXT, TEXT + " And in a year?"], GREEDY)
    by_ids, alone = llm.generate([by_text.prompt_token_ids, TEXT], GREEDY)
    assert by_text.prompt == TEXT
    assert by_ids.prompt is None
    assert by_ids.outputs == by_text.outputs == alone.outputs
    assert second.outputs[0].text != by_text.outputs[0].text
    assert len(by_text.outputs[0].token_ids) == 12
    assert by_text.outputs[0].finish_reason == "length"


def test_the_second_time_the_prompt_is_cached(llm: LLM) -> None:
    llm.flush_cache()
    (cold,) = llm.generate(TEXT, GREEDY)
    (warm,) = llm.generate(TEXT, GREEDY)
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens >= len(warm.prompt_token_ids) - 16
    assert warm.outputs == cold.outputs


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
    (whole,) = llm.generate(TEXT, GREEDY)
    outputs = list(llm.stream(TEXT, GREEDY))
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


def test_the_collector_is_paused_during_a_call_and_enabled_after_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, seen = Loop.turn, []

    def spy(loop: Loop) -> list[FromRuntime]:
        seen.append(gc.isenabled())
        if len(seen) == 3:
            raise KeyboardInterrupt
        return turn(loop)

    monkeypatch.setattr(Loop, "turn", spy)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXT, GREEDY)
    assert seen == [False] * 3
    assert gc.isenabled()


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


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (whole,) = llm.generate(TEXT, GREEDY)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 :][:3]
    (stopped,) = llm.generate(TEXT, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=(stop,)))
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert stopped.outputs[0].finish_reason == "stop"
    assert llm.get_metrics().n_running == 0


def test_a_stop_token_is_among_the_ids_but_not_in_the_text(llm: LLM) -> None:
    (whole,) = llm.generate(TEXT, GREEDY)
    last = whole.outputs[0].token_ids[5]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(last,))
    (stopped,) = llm.generate(TEXT, params)
    ids = stopped.outputs[0].token_ids
    assert ids == whole.outputs[0].token_ids[: len(ids)]
    assert ids[-1] == last
    assert stopped.outputs[0].finish_reason == "stop"
    (before,) = llm.generate(
        TEXT, SamplingParams(temperature=0.0, max_tokens=max(1, len(ids) - 1), ignore_eos=True)
    )
    assert len(ids) == 1 or stopped.outputs[0].text == before.outputs[0].text


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


def test_an_interrupted_call_leaves_nothing_to_the_next(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Loop.turn
    turns = iter((turn, turn, None))

    def interrupted(loop: Loop) -> list[FromRuntime]:
        step = next(turns, turn)
        if step is None:
            raise KeyboardInterrupt
        return step(loop)

    monkeypatch.setattr(Loop, "turn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([TEXT] * 3, GREEDY)
    (after,) = llm.generate(TEXT, GREEDY)
    assert len(after.outputs[0].token_ids) == 12
    assert llm.get_metrics().n_running == 0


def test_errors_name_the_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no-such-folder"):
        LLM(str(tmp_path / "no-such-folder"))
    with pytest.raises(ConfigError, match="page_size 0"):
        LLM("tiny", page_size=0)
    with pytest.raises(ConfigError, match="max_model_len 100000"):
        LLM("tiny", max_model_len=100_000)
    with pytest.raises(ConfigError, match="load_format 'gguf'"):
        LLM("tiny", load_format="gguf")
    with pytest.raises(CheckpointError, match="no-such-file"):
        LLM("tiny", chat_template=str(tmp_path / "no-such-file"))
    with pytest.raises(ConfigError, match="enforce_eager 'yes'"):
        LLM("tiny", enforce_eager="yes")
    with pytest.raises(ConfigError, match="gpu_memory_utilization .*mem_fraction_static"):
        LLM("tiny", gpu_memory_utilization=0.5, mem_fraction_static=0.5)
    for name, value in (
        ("tensor_parallel_size", 2),
        ("tensor_parallel_size", True),
        ("enable_lora", True),
        ("trust_remote_code", True),
    ):
        with pytest.raises(UnsupportedFeature, match=rf"^{name} {value!r} "):
            LLM("tiny", **{name: value})
    with pytest.raises(UnsupportedFeature, match=r"max_model_length.* max_model_len\b"):
        LLM("tiny", max_model_length=256)
    with pytest.raises(UnsupportedFeature, match="tp_size 2 .*one device"):
        LLM("tiny", tp_size=2)
    with pytest.raises(UnsupportedFeature, match="hf_overrides, nothing"):
        LLM("tiny", tensor_parallel_size=1, swap_space=None, hf_overrides={}, nothing=None)
    with pytest.raises(ConfigError, match="dtype 'float8'"):
        LLM("tiny", dtype="float8")


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "^block_size 0 "),
        ({"block_size": 16, "page_size": 16}, "page_size and block_size "),
        ({"model": "tiny", "model_path": "tiny"}, "model and model_path "),
        ({"mem_fraction_static": 1.5}, "^mem_fraction_static 1.5 "),
        ({"context_length": 100_000}, "^context_length 100000 "),
        ({"random_seed": -1}, "^random_seed -1 "),
        ({"model_path": ""}, "^model_path is ''"),
        ({"disable_radix_cache": "yes"}, "^disable_radix_cache 'yes' "),
    ],
)
def test_errors_name_the_alias_that_was_given(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**settings)


def test_a_model_is_not_given_by_position_and_by_alias() -> None:
    with pytest.raises(ConfigError, match="model and model_path "):
        LLM("tiny", model_path="tiny")


def test_errors_name_the_wrong_argument(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="prompts is 5"):
        llm.generate(5)
    with pytest.raises(InvalidRequest, match="prompts is None"):
        llm.generate()
    with pytest.raises(InvalidRequest, match=r"sampling_params is \['hot'\]"):
        llm.generate([TEXT], ["hot"])
    with pytest.raises(InvalidRequest, match="2 priority for 1 prompts"):
        llm.generate([TEXT], GREEDY, priority=[1, 2])
    with pytest.raises(InvalidRequest, match="a prompt has .*'images'"):
        llm.generate([{"prompt": TEXT, "images": []}])
    with pytest.raises(InvalidRequest, match="prompt .*prompt_token_ids"):
        llm.generate({"prompt": TEXT, "prompt_token_ids": [1]})
    with pytest.raises(InvalidRequest, match="cache_salt is 5"):
        llm.generate({"prompt": TEXT, "cache_salt": 5})


def test_a_checkpoint_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    save_llama(tmp_path)
    llm = LLM(str(tmp_path), max_total_tokens=256)
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, seed=1, ignore_eos=True))
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 3)
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        llm.generate(TEXT)


def test_calls_after_shutdown_are_rejected() -> None:
    llm = LLM("tiny", max_total_tokens=256, max_model_len=256)
    llm.shutdown()
    with pytest.raises(ConfigError, match="shut down"):
        llm.generate(TEXT)


def test_calls_accept_neutral_arguments_of_vllm_and_reject_others_by_name(llm: LLM) -> None:
    (alone,) = llm.generate(TEXT, GREEDY)
    (beside,) = llm.generate(TEXT, GREEDY, lora_request=None, prompt_token_ids=None)
    assert beside.outputs == alone.outputs
    with pytest.raises(UnsupportedFeature, match=r"lora_request 'mine' .*adapters"):
        llm.generate(TEXT, GREEDY, lora_request="mine")
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


def test_a_call_after_an_interrupted_one_gives_the_same_output(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (before,) = llm.generate(TEXT, GREEDY)
    launch = CpuExecutor.launch

    def interrupted(self: CpuExecutor, plan: StepPlan) -> object:
        signal.raise_signal(signal.SIGINT)
        return launch(self, plan)

    monkeypatch.setattr(CpuExecutor, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], GREEDY)
    monkeypatch.undo()
    assert llm.get_metrics().n_running == 0
    (after,) = llm.generate(TEXT, GREEDY)
    assert after.outputs == before.outputs


def test_a_call_during_a_stream_is_rejected_and_the_stream_continues(llm: LLM) -> None:
    (whole,) = llm.generate(TEXT, GREEDY)
    stream = llm.stream(TEXT, GREEDY)
    next(stream)
    with pytest.raises(ConfigError, match="answering another call"):
        llm.generate("one", GREEDY)
    assert list(stream)[-1].outputs == whole.outputs


@pytest.mark.parametrize("prompts", [b"abcd", [b"abcd"], [bytearray(b"abcd")], {"prompt": b"abcd"}])
def test_bytes_are_rejected_as_a_prompt(llm: LLM, prompts: object) -> None:
    with pytest.raises(InvalidRequest, match="decode it to text"):
        llm.generate(prompts, GREEDY)


def test_a_model_may_be_a_path(tmp_path: Path) -> None:
    save_llama(tmp_path)
    assert LLM(tmp_path, max_total_tokens=256).generate([1, 2], GREEDY)[0].finished


def test_the_prompt_with_the_lowest_priority_goes_first(sensitive: Path) -> None:
    llm = LLM(sensitive, device="cpu", max_total_tokens=4096, max_model_len=256, max_num_seqs=1)
    priorities = [5] * 200
    priorities[150], priorities[190] = -1, 0
    outputs = llm.generate([TEXT] * 200, SamplingParams(max_tokens=1), priority=priorities)
    assert [index for index, output in enumerate(outputs) if output.num_cached_tokens == 0] == [150]


def test_a_missing_device_is_reported_before_a_checkpoint_is_downloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
