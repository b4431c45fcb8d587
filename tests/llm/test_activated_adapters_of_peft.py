"""Activated LoRAs answer as PEFT does."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv import LLM, LoRARequest, SamplingParams
from radixkv.checkpoints import resolve
from radixkv.checkpoints.embedded import embedded_folder
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, HYBRIDS, load_oracle, random_ids
from support.lora import linear_modules, save_adapter

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft", reason="PEFT is installed by `make test-nightly`")

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

INVOCATION = [7, 9, 11]
JUDGE = LoRARequest("judge")
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def prompts(vocab_size: int) -> list[list[int]]:
    """With the invocation at the start, in the middle, at the end, several times, in part, and not at all."""

    def words(n: int, seed: int) -> list[int]:
        return [token % (vocab_size - 12) + 12 for token in random_ids(n, seed=seed)]

    return [
        [*words(70, 1), *INVOCATION, *words(10, 2)],
        [*words(33, 3), *INVOCATION],
        [*INVOCATION, *words(20, 4)],
        [*words(40, 5), *INVOCATION, *words(20, 6), *INVOCATION, *words(5, 7)],
        [*words(40, 8), *INVOCATION[:2]],
        [*words(40, 9), *INVOCATION, *words(3, 10), *INVOCATION[:2]],
        words(30, 11),
    ]


def peft_answers(base: Any, folder: Path, all_ids: list[list[int]]) -> list[list[int]]:
    model = peft.PeftModel.from_pretrained(base, folder).eval()
    answers = []
    for ids in all_ids:
        tokens = torch.tensor([ids])
        out = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=12,
            min_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
        )
        answers.append(out[0, len(ids) :].tolist())
    return answers


NOT_OF_PEFT = {"qwen3-moe", "qwen3-moe-alternating", "qwen3-next", "opt"}
"""Models for which PEFT 0.21.2 has no activated LoRA: it refuses to wrap their experts, or fails on flat rows."""
NAMES = [
    name
    for name in (*CHECKPOINTS, *HYBRIDS)
    if name not in NOT_OF_PEFT and (name in CHECKPOINTS or name.startswith("qwen"))
]


@pytest.mark.parametrize("name", ["tiny", *NAMES])
def test_greedy_answers_are_those_of_peft(tmp_path: Path, name: str) -> None:
    """Each prompt after another request has left the model's pages, and again after its own."""
    if name == "tiny":
        folder = embedded_folder()
    else:
        folder = tmp_path / "base"
        save_checkpoint(folder, **(CHECKPOINTS | HYBRIDS)[name])
    base = load_oracle(resolve(str(folder)))
    modules = linear_modules(base)
    save_adapter(tmp_path / "judge", base, modules, seed=2, alora_invocation_tokens=INVOCATION)
    all_ids = prompts(base.config.get_text_config().vocab_size)
    settings = {"dtype": "float32", "max_model_len": 256, "max_total_tokens": 4096, "max_num_batched_tokens": 48}
    with LLM(folder, device="cpu", lora_modules={"judge": tmp_path / "judge"}, **settings) as llm:
        alone = llm.generate(all_ids, PARAMS, use_tqdm=False)
        found = [llm.generate(all_ids, PARAMS, use_tqdm=False, lora_request=JUDGE) for _ in range(2)]
    expected = peft_answers(base, tmp_path / "judge", all_ids)
    for outputs in found:
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    n_changed = sum(one.outputs != other.outputs for one, other in zip(alone, found[0], strict=True))
    assert n_changed == 5, "those with an invocation"
