"""Where steps can have fewer adapters than are loaded, answers are what they are alone, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM, BeamSearchParams, LoRARequest, SamplingParams
from radixkv.checkpoints import resolve
from radixkv.runtime.device.adapters.rows import StepRows
from support.cases import rest_nightly
from support.checkpoints import save_checkpoint
from support.device_support import HYBRIDS, load_oracle, random_ids
from support.lora import linear_modules, save_adapter

NAMES = ("sql", "law", "math")
INVOCATION = [7, 8]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
REQUESTS = [None, *(LoRARequest(NAMES[index % 3]) for index in range(11))]
PROMPTS = [random_ids(20 + 5 * index, seed=index) for index in range(12)]


def opened(folder: Path, **settings: Any) -> LLM:
    defaults = {"dtype": "float32", "max_model_len": 256, "max_total_tokens": 4096}
    adapters = {name: folder / name for name in NAMES}
    return LLM(folder / "base", device="cpu", lora_modules=adapters, **{**defaults, **settings})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    save_checkpoint(folder / "base")
    oracle = load_oracle(resolve(str(folder / "base")))
    for seed, name in enumerate((*NAMES, "judge")):
        tokens = INVOCATION if name == "judge" else None
        save_adapter(folder / name, oracle, linear_modules(oracle), seed=seed, alora_invocation_tokens=tokens)
    return folder


def alone(llm: LLM, params: SamplingParams = PARAMS) -> list[Any]:
    found = []
    for prompt, request in zip(PROMPTS, REQUESTS, strict=True):
        llm.flush_cache()
        found.append(llm.generate([prompt], params, use_tqdm=False, lora_request=request)[0].outputs)
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    with opened(folder) as llm:
        return alone(llm)


@pytest.fixture
def adapters_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Gets the adapters of each step that is computed."""
    found: list[set[str]] = []
    plan = StepRows.plan

    def note(self: StepRows, rows: Sequence[Any]) -> None:
        found.append({row.adapter for row in rows} - {""})
        plan(self, rows)

    monkeypatch.setattr(StepRows, "plan", note)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("max_loras", "settings"),
    rest_nightly(
        product(
            [1, 2],
            [
                {},
                {"schedule_policy": "lpm", "max_num_batched_tokens": 64},
                {"max_total_tokens": 256, "max_model_len": 128, "num_reserved_decode_tokens": 0},
                {"host_memory": "4MiB", "load_policy": "always", "max_total_tokens": 512, "max_model_len": 128},
            ],
        ),
        kept=(7,),
    ),
)
def test_adapters_take_turns(
    folder: Path, expected: list[Any], adapters_of_steps: list[set[str]], max_loras: int, settings: dict[str, Any]
) -> None:
    """Also with preemptions, and with pages that are loaded from host memory."""
    with opened(folder, max_loras=max_loras, **settings) as llm:
        for _ in range(2):  # the second time warm
            found = llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=REQUESTS)
            assert [output.outputs for output in found] == expected
        metrics = llm.get_metrics()
    stats, host = metrics.adapters, metrics.host
    assert max(map(len, adapters_of_steps)) == max_loras
    assert len(set().union(*adapters_of_steps)) == 3
    assert (stats.n_adapters, stats.n_in_slots, stats.n_waiting) == (3, max_loras, 0)
    assert (host is None) == ("host_memory" not in settings)
    assert host is None or host.pages_loaded_total > 0
    assert stats.slot_loads_total >= 4, "each in both rounds, but those that were there"


@pytest.mark.nightly
def test_choices_and_beams_take_turns(folder: Path) -> None:
    sampled = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, logprobs=1)
    beams = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    requests = [LoRARequest(name) for name in NAMES]
    prompts = PROMPTS[:3]
    answers = []
    for settings in ({}, {"max_loras": 1}):
        with opened(folder, **settings) as llm:
            outputs = llm.generate(prompts, sampled, use_tqdm=False, lora_request=requests)
            found = llm.beam_search(prompts, beams, lora_request=requests)
            answers.append(([one.outputs for one in outputs], [one.sequences for one in found]))
    assert answers[0] == answers[1]


def test_a_prompt_without_an_invocation_needs_no_slot(folder: Path) -> None:
    prompt = [token for token in PROMPTS[5] if token not in INVOCATION]
    with opened(folder, max_loras=1, max_cpu_loras=4) as llm:
        llm.load_lora_adapter("judge", folder / "judge")
        llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False, lora_request=LoRARequest("sql"))
        llm.generate([prompt], PARAMS, use_tqdm=False, lora_request=LoRARequest("judge"))
        assert llm.get_metrics().adapters.slot_loads_total == 1
        llm.generate([[*prompt, *INVOCATION, 3]], PARAMS, use_tqdm=False, lora_request=LoRARequest("judge"))
        assert llm.get_metrics().adapters.slot_loads_total == 2


def test_an_adapter_is_replaced_while_others_take_turns(folder: Path, expected: list[Any]) -> None:
    with opened(folder, max_loras=1) as llm:
        for index in (1, 2):
            llm.load_lora_adapter("one", folder / NAMES[index - 1], load_inplace=index > 1)
            (found,) = llm.generate([PROMPTS[index]], PARAMS, use_tqdm=False, lora_request=LoRARequest("one"))
            assert found.outputs == expected[index]
        llm.unload_lora_adapter("one")
        (again,) = llm.generate([PROMPTS[1]], PARAMS, use_tqdm=False, lora_request=LoRARequest("sql"))
        assert again.outputs == expected[1]


def test_prompts_that_wait_for_a_slot_compute_what_they_have_in_common_once(tmp_path: Path) -> None:
    """Of a model with recurrent layers, which keeps a state where waiting prompts leave each other."""
    save_checkpoint(tmp_path / "base", **HYBRIDS["qwen3.5"])
    oracle = load_oracle(resolve(str(tmp_path / "base")))
    for seed, name in enumerate(NAMES):
        save_adapter(tmp_path / name, oracle, linear_modules(oracle), seed=seed)
    common = random_ids(640, seed=8)
    prompts = [[*common, *random_ids(20, seed=number)] for number in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=1)
    requests = [LoRARequest(NAMES[number % 2]) for number in range(8)]
    computed = []
    for settings in ({}, {"max_loras": 1}):
        with opened(tmp_path, max_model_len=1024, max_total_tokens=8192, **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
        computed.append(sum(len(one.prompt_token_ids) - one.num_cached_tokens for one in outputs))
    assert computed[1] <= computed[0]
