"""Activated LoRAs: the model computes a prompt up to the last invocation, and the adapter what follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM, LoRARequest, SamplingParams
from radixkv.checkpoints import resolve
from support.checkpoints import save_checkpoint
from support.device_support import load_oracle, random_ids
from support.lora import linear_modules, save_adapter

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
INVOCATION = [7, 9, 11]
JUDGE, RANK, SQL = LoRARequest("judge"), LoRARequest("rank"), LoRARequest("sql")
HEAD = random_ids(70, seed=1)
PROMPT = [*HEAD, *INVOCATION, *random_ids(10, seed=2)]


def opened(folder: Path, **settings: Any) -> LLM:
    defaults = {"dtype": "float32", "max_model_len": 512, "max_total_tokens": 4096}
    return LLM(folder, device="cpu", **{**defaults, **settings})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a LoRA of it, and two activated ones with the same invocation."""
    folder = tmp_path_factory.mktemp("activated")
    save_checkpoint(folder / "base")
    oracle = load_oracle(resolve(str(folder / "base")))
    modules = linear_modules(oracle)
    save_adapter(folder / "sql", oracle, modules, seed=2)
    for seed, name in enumerate(("judge", "rank"), 3):
        save_adapter(folder / name, oracle, modules, seed=seed, alora_invocation_tokens=INVOCATION)
    return folder


def modules(folders: Path) -> dict[str, Path]:
    return {name: folders / name for name in ("sql", "judge", "rank")}


@pytest.fixture
def llm(folders: Path) -> Iterator[LLM]:
    with opened(folders / "base", lora_modules=modules(folders)) as llm:
        yield llm


def generate(llm: LLM, prompt: Sequence[int], request: LoRARequest | None, params: SamplingParams = PARAMS) -> Any:
    (output,) = llm.generate([list(prompt)], params, use_tqdm=False, lora_request=request)
    return output


def cold(llm: LLM, prompt: Sequence[int], request: LoRARequest | None, params: SamplingParams = PARAMS) -> Any:
    llm.flush_cache()
    output = generate(llm, prompt, request, params)
    assert output.num_cached_tokens == 0
    return output.outputs


def test_pages_before_the_invocation_are_shared_in_both_directions(llm: LLM) -> None:
    """To the token, and to the last bit of the answers; those behind it are of one adapter."""
    expected = {one: cold(llm, PROMPT, one) for one in (None, SQL, JUDGE, RANK)}
    assert len({tuple(outputs[0].token_ids) for outputs in expected.values()}) == 4
    for first, second in ((None, JUDGE), (JUDGE, None), (JUDGE, RANK)):
        llm.flush_cache()
        generate(llm, PROMPT, first)
        warm = generate(llm, PROMPT, second)
        assert (warm.num_cached_tokens, warm.outputs) == (70, expected[second])
        again = generate(llm, PROMPT, second)
        assert (again.num_cached_tokens, again.outputs) == (80, expected[second])
    assert generate(llm, PROMPT, SQL).num_cached_tokens == 0
