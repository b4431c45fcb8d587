"""``LLM`` without prefix caching, of a model with a sliding window in every layer: the pool bounds no request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from radixkv import LLM, SamplingParams
from radixkv.errors import ContextLengthExceeded
from support.checkpoints import VOCAB, save_checkpoint

WINDOW, POOL_TOKENS, BUDGET = 24, 96, 48
N_PROMPT, N_ANSWER = 150, 120
GREEDY = SamplingParams(temperature=0.0, max_tokens=N_ANSWER, ignore_eos=True)
PROMPT = [(7 * i * i + 3) % VOCAB for i in range(N_PROMPT)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder, model_type="mistral", sliding_window=WINDOW)
    return folder


def opened(folder: Path, **settings: Any) -> LLM:
    limits = {"max_total_tokens": POOL_TOKENS, "max_num_batched_tokens": BUDGET, "max_model_len": 512}
    return LLM(folder, device="cpu", enable_prefix_caching=False, **(limits | settings))


def test_an_answer_longer_than_the_pool(folder: Path) -> None:
    llm = opened(folder)
    assert llm.max_prompt_and_answer == 512
    outputs = llm.generate([PROMPT, PROMPT[:40]], GREEDY, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for output in outputs:
        n_prompt = len(output.prompt_token_ids)
        tokens = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]])
        with torch.inference_mode():
            logits = model(tokens).logits[0, n_prompt - 1 : -1]
        assert list(output.outputs[0].token_ids) == logits.argmax(-1).tolist()
        assert len(output.outputs[0].token_ids) == N_ANSWER
    llm.shutdown()


@pytest.mark.parametrize(
    "settings",
    [{"enable_prefix_caching": True}, {"max_num_batched_tokens": POOL_TOKENS}],
    ids=["with the tree", "steps as long as the pool"],
)
def test_other_engines_refuse_what_the_pool_does_not_hold(folder: Path, settings: dict[str, Any]) -> None:
    if "enable_prefix_caching" in settings:
        llm = LLM(folder, device="cpu", max_total_tokens=POOL_TOKENS, max_model_len=512)
    else:
        llm = opened(folder, **settings)
    assert llm.max_prompt_and_answer == POOL_TOKENS + 1
    with pytest.raises(ContextLengthExceeded, match="the pool holds 96 tokens"):
        llm.generate([PROMPT], GREEDY, use_tqdm=False)
    llm.shutdown()
