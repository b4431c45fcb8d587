"""Short prompts on CUDA, whose tokens are rows of a decode graph: answers are those of the kernels of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from gpu_drive import Drive, executor_of, loop_of
from gpu_support import NEAR_TIE, check_same_answers, greedy, opened, random_ids

from radixkv import LLM
from radixkv.runtime.device.pack import PackedStep
from radixkv.runtime.step.plan import StepPlan

N_NEW = 24
N_TURNS = 5


def record_split(llm: LLM) -> list[bool]:
    """Records of each step with prompts from now on whether their tokens are rows of a decode graph."""
    packer = executor_of(llm)._packer  # type: ignore[attr-defined]
    pack, found = packer.pack, list[bool]()

    def record_and_pack(plan: StepPlan) -> PackedStep:
        step: PackedStep = pack(plan)
        if plan.n_decode < len(plan.rows):
            found.append(step.n_decode == step.n_rows)
        return step

    patch.object(packer, "pack", record_and_pack).start()
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attention_backend": "triton"},
        {"kv_cache_dtype": "fp8"},
        {"speculative_config": {"method": "ngram"}},
    ],
)
def test_conversations_that_grow_beside_others(sensitive_folder: Path, settings: dict[str, Any]) -> None:
    """Each turn adds 1 to 50 tokens to a cached conversation while others decode, with and without the sampler."""
    texts = [random_ids(300 + 40 * n, seed=n) for n in range(4)]
    sent: dict[str, list[int]] = {}
    with opened(sensitive_folder, **settings) as llm:
        were_split, drive, turns = record_split(llm), Drive(llm), [0] * 4
        while any(turn < N_TURNS for turn in turns) or loop_of(llm).has_work:
            for n, turn in enumerate(turns):
                last = f"{n}-{turn - 1}"
                if turn < N_TURNS and (turn == 0 or last in drive.ends):
                    new = random_ids(1 + (7 * turn + 13 * n) % 50, seed=100 + 10 * turn + n)
                    texts[n] = texts[n] + drive.answers.get(last, []) + new
                    sent[f"{n}-{turn}"] = texts[n]
                    drive.submit(f"{n}-{turn}", texts[n], greedy(N_NEW + 5 * n, logprobs=1 if turn % 2 else None))
                    turns[n] += 1
            drive.turn()
        assert sum(were_split) >= 8
        assert not all(were_split), "the first prompts are long"
        drive.check_all_ended()
    with opened(sensitive_folder, enforce_eager=True, **settings) as llm:
        were_split = record_split(llm)
        answers = [drive.answers[name] for name in sent]
        params = [greedy(len(answer), logprobs=20) for answer in answers]
        expected = llm.generate(list(sent.values()), params, use_tqdm=False)
        assert not any(were_split), "without graphs, kernels of prompts compute them"
    check_same_answers(expected, answers, tolerance=2 * NEAR_TIE if "kv_cache_dtype" in settings else NEAR_TIE)
