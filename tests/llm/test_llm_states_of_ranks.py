"""Models with gated delta nets or Mamba2 on several ranks.

States come back from all tiers with the bits of cold prompts, and beams go on from each other's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM, BeamSearchParams, RequestOutput, SamplingParams
from radixkv.llm import BeamSearchSequence
from support.cases import rest_nightly
from support.checkpoints import save_checkpoint
from support.device_support import HYBRIDS, random_ids

END = 2
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 512, "load_policy": "always"}


@pytest.fixture(
    scope="module", params=rest_nightly(["qwen3.5", "qwen3.5-moe", "qwen3-next", "nemotron-h"], kept=(0,))
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With one KV head, which both ranks have, and of each a part of the states."""
    folder = tmp_path_factory.mktemp(request.param)
    save_checkpoint(folder, **{**HYBRIDS[request.param], "eos_token_id": END, "num_key_value_heads": 1})
    return folder


def text(n: int, seed: int) -> list[int]:
    return [one for one in random_ids(2 * n, seed=seed) if one != END][:n]


def scores(output: RequestOutput) -> list[dict[int, float]]:
    (answer,) = output.outputs
    assert answer.logprobs is not None
    return [{token: one.logprob for token, one in position.items()} for position in answer.logprobs]


@pytest.mark.nightly
def test_states_of_ranks_come_back_from_host_memory_and_after_a_restart_from_disk(
    folder: Path, tmp_path: Path
) -> None:
    system = [*text(141, 1), END]
    prompts = [[*system, *text(75 + n, 10 + n), END, *text(3, 3)] for n in range(2)]
    prompts.append([*prompts[1], *text(30, 20), END, *text(40, 21), END, *text(3, 3)])
    others = [text(200, 30 + n) for n in range(3)]

    def answer(llm: LLM, prompts: list[list[int]] = prompts, *, salted: bool = False) -> list[RequestOutput]:
        salts: list[dict[str, Any]] = [{"cache_salt": f"{n}"} if salted else {} for n in range(len(prompts))]
        inputs: list[Any] = [{"prompt_token_ids": one, **salt} for one, salt in zip(prompts, salts, strict=True)]
        return [llm.generate([one], PARAMS, use_tqdm=False)[0] for one in inputs]

    def search(llm: LLM) -> list[BeamSearchSequence]:
        (found,) = llm.beam_search([{"prompt_token_ids": text(70, 40)}], BeamSearchParams(3, 8, ignore_eos=True))
        return found.sequences

    with LLM(folder, enable_prefix_caching=False, **SETTINGS) as llm:
        alone, beams_alone = [scores(one) for one in answer(llm)], search(llm)
    tiers = {"host_memory_bytes": 16 << 20, "cache_dir": str(tmp_path), "tensor_parallel_size": 2}
    few = {"state_memory_bytes": 75_000, "max_total_tokens": 640}
    with LLM(folder, **SETTINGS, **tiers, **few) as llm:
        cold = answer(llm, salted=True)
        answer(llm)
        answer(llm, others)
        warm = answer(llm)
        host, beams = llm.get_metrics().host, search(llm)
    with LLM(folder, **SETTINGS, **tiers, **few) as llm:
        again = answer(llm)
    for one, expected in zip(cold, alone, strict=True):
        assert scores(one) == [pytest.approx(position, abs=1e-4) for position in expected]
    assert not any(one.num_cached_tokens for one in cold)
    assert [beam.tokens for beam in beams] == [beam.tokens for beam in beams_alone]
    for found in (warm, again):
        assert [scores(one) for one in found] == [scores(one) for one in cold]
        assert all((one.num_cached_tokens or 0) >= 128 for one in found)
    assert sum(one.num_loaded_tokens or 0 for one in warm) > 200
    assert sum(one.num_fetched_tokens or 0 for one in again) > 200
    assert host is not None
    assert host.copies_failed_total == 0
