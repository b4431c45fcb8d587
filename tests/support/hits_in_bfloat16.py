"""Prompts of which three tokens follow what is cached, and how far their scores are from those of cold prompts.

In bfloat16 rounding depends on the processor's products, and may give a token to another expert, with any error. So
the median over the prompts is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from radixkv import LLM, RequestOutput, SamplingParams
from support.device_support import random_ids

N_CACHED = [0, 128, 128, 0, 0, 192, 192, 192, 192]
"""Tokens of each prompt that ``answer_prompts`` finds cached."""


def answer_prompts(llm: LLM, end_token_id: int) -> list[RequestOutput]:
    """Answers prompts behind a message's end, at a fork and behind answers, one after another."""

    def text(n: int, seed: int) -> list[int]:
        return [one for one in random_ids(2 * n, seed) if one != end_token_id][:n]

    system, plain = [*text(127, 1), end_token_id], text(300, 2)
    prompts = [[*system, *text(3, seed)] for seed in (3, 4, 5)] + [plain]
    prompts += [[*plain[:192], *text(3, seed)] for seed in (6, 7, 8)]
    for seed in (9, 10):
        first = text(149, seed)
        (output,) = _answers(llm, first, 44)
        prompts.append([*first, *output.outputs[0].token_ids, *text(3, seed)])
    return [_answers(llm, prompt)[0] for prompt in prompts]


def typical_error(warm: Sequence[RequestOutput], cold: LLM) -> float:
    """Returns how much the scores of the likeliest tokens differ, as the median over prompts that found something.

    Args:
        warm: what ``answer_prompts`` has returned.
        cold: an engine that has nothing cached, and caches nothing.
    """
    hits = [one for one in warm if one.num_cached_tokens]
    return median(_error(one, _answers(cold, one.prompt_token_ids)[0]) for one in hits)


def _answers(llm: LLM, prompt: Sequence[int], n_tokens: int = 1) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=n_tokens, logprobs=3, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)


def _error(output: RequestOutput, other: RequestOutput) -> float:
    """Returns the largest difference; 1 if the likeliest tokens are others."""
    (scores, *_), (other_scores, *_) = output.outputs[0].logprobs or (), other.outputs[0].logprobs or ()
    common = scores.keys() & other_scores.keys()
    if len(common) < 2:
        return 1.0
    return max(abs(scores[one].logprob - other_scores[one].logprob) for one in common)
