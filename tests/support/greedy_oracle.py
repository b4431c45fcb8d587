"""Compares greedy answers with Transformers, which may round two near logits the other way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel


def check_greedy(
    oracle: PreTrainedModel, answers: Iterable[tuple[Sequence[int], Sequence[int]]], *, margin: float = 2e-4
) -> None:
    """Checks that each token of an answer is the one with the highest logit in Transformers.

    Args:
        oracle: the model, in float32.
        answers: prompts and their answers.
        margin: a token counts if no other one's logit is as near to the highest. Most tokens must count.
    """
    is_clear: list[Tensor] = []
    for prompt, answer in answers:
        with torch.inference_mode():
            # With hidden states, because Gemma 4 fails without them where layers share KV but have no own inputs.
            found = oracle(torch.tensor([[*prompt, *answer]]), output_hidden_states=True)
        logits = found.logits[0, len(prompt) - 1 : -1]
        top = logits.topk(2).values
        is_clear.append(top[:, 0] - top[:, 1] > margin)
        assert torch.equal(logits.argmax(-1)[is_clear[-1]], torch.tensor(answer)[is_clear[-1]])
    assert torch.cat(is_clear).float().mean() > 0.5
