"""Evaluation of the model on held-out problems, by family and length of the prompt."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.cases import OUTPUT_TOKENS, count_right, families, fitting_cases, lengths
from training.chat_format import BEGIN, END, END_OF_TURN, ChatFormat, Conversation
from training.llama import Cache, Llama

_BATCH_TOKENS = 1 << 19
"""Maximum prompt tokens of a batch, padding included."""


def score(model: Llama, tokenizer: Tokenizer, n_cases: int, max_length: int) -> dict[str, dict[int, float]]:
    """Returns the percentage of right answers by family and length, decoded greedily in the model's dtype.

    Prompts have up to about ``max_length`` tokens. Takes seconds on a GPU.
    """
    percentages: dict[str, dict[int, float]] = {}
    chat_format = ChatFormat()

    def encode(prompt: str | Conversation) -> list[int]:
        ids: list[int] = tokenizer.encode(render(prompt, chat_format), add_special_tokens=False).ids
        return ids

    for family in families():
        percentages[family] = {}
        for length in (length for length in lengths(family) if length <= max_length):
            batch = fitting_cases(family, length, n_cases, encode)
            texts = [render(step.prompt, chat_format) for case in batch for step in case.steps]
            n_right = count_right(batch, answers(model, tokenizer, texts))
            percentages[family][length] = round(100 * n_right / n_cases, 1)
    return percentages


def render(prompt: str | Conversation, chat_format: ChatFormat) -> str:
    """Returns the prompt as one text."""
    return BEGIN + prompt if isinstance(prompt, str) else chat_format.prompt(prompt)


@torch.inference_mode()
def answers(model: Llama, tokenizer: Tokenizer, prompts: Sequence[str]) -> list[str]:
    """Generates greedy answers up to an end token or ``OUTPUT_TOKENS``."""
    all_ids = [encoding.ids for encoding in tokenizer.encode_batch(list(prompts), add_special_tokens=False)]
    end_ids = {tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TURN)}
    texts = []
    step = max(1, _BATCH_TOKENS // max(map(len, all_ids)))
    for start in range(0, len(all_ids), step):
        for ids in _generate(model, all_ids[start : start + step], end_ids):
            length = next((index for index, token in enumerate(ids) if token in end_ids), len(ids))
            texts.append(tokenizer.decode(ids[:length]))
    return texts


def _generate(model: Llama, prompts: Sequence[Sequence[int]], end_ids: Set[int | None]) -> list[list[int]]:
    """Returns the tokens of each answer; generation stops soon after all answers have ended."""
    weight = model.model.embed_tokens.weight
    sizes = torch.tensor([len(ids) for ids in prompts], device=weight.device)
    longest = max(map(len, prompts))
    padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in prompts], device=weight.device)
    cache = Cache(model.shape, len(prompts), longest + OUTPUT_TOKENS, weight)
    hidden = model.forward_cached(padded, torch.zeros_like(sizes), cache)
    # Cache entries of padding are overwritten before any token attends to them.
    last = hidden[torch.arange(len(prompts), device=weight.device), sizes - 1]
    out: list[Tensor] = []
    ends = torch.tensor([*end_ids], device=weight.device)
    for step in range(OUTPUT_TOKENS):
        if step % 16 == 0 and out and bool(torch.isin(torch.stack(out, 1), ends).any(1).all()):
            break
        out.append(model.logits(last).argmax(-1))
        last = model.forward_cached(out[-1][:, None], sizes + step, cache)[:, 0]
    ids: list[list[int]] = torch.stack(out, 1).tolist()
    return ids
