"""How often the model answers right: held-out problems of each family, by the length of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from tokenizers import Tokenizer

from training.cases import OUTPUT_TOKENS, Case, cases, families
from training.llama import Cache, Llama
from training.tokenizer import BEGIN, END, END_OF_TURN, chat_message, header

_TOKENS_AT_ONCE = 1 << 19


def score(model: Llama, tokenizer: Tokenizer, n_cases: int, lengths: Sequence[int]) -> dict[str, dict[int, float]]:
    """Percent right by family and length, greedily and with the model's own dtype. Cost: seconds on a GPU."""
    found: dict[str, dict[int, float]] = {}
    for family in families():
        found[family] = {}
        for length in lengths:
            taken = list(islice(cases(family, length), n_cases))
            texts = answers(model, tokenizer, [rendered(case) for case in taken])
            n_right = sum(case.is_right(text) for case, text in zip(taken, texts, strict=True))
            found[family][length] = round(100 * n_right / n_cases, 1)
    return found


def rendered(case: Case) -> str:
    """The prompt as one text, by the chat template if it has messages."""
    if isinstance(case.prompt, str):
        return BEGIN + case.prompt
    return BEGIN + "".join(map(chat_message, case.prompt)) + header("assistant")


@torch.inference_mode()
def answers(model: Llama, tokenizer: Tokenizer, prompts: Sequence[str]) -> list[str]:
    """Greedy answers up to their end, or of ``OUTPUT_TOKENS``."""
    all_ids = [encoding.ids for encoding in tokenizer.encode_batch(list(prompts), add_special_tokens=False)]
    ends = {tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TURN)}
    texts = []
    step = max(1, _TOKENS_AT_ONCE // max(map(len, all_ids)))
    for start in range(0, len(all_ids), step):
        for ids in _generated(model, all_ids[start : start + step]):
            length = next((place for place, token in enumerate(ids) if token in ends), len(ids))
            texts.append(tokenizer.decode(ids[:length]))
    return texts


def _generated(model: Llama, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    weight = model.model.embed_tokens.weight
    lengths = torch.tensor([len(ids) for ids in prompts], device=weight.device)
    longest = max(map(len, prompts))
    padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in prompts], device=weight.device)
    cache = Cache(model.shape, len(prompts), longest + OUTPUT_TOKENS, weight)
    hidden = model.cached(padded, torch.zeros_like(lengths), cache)
    # What padding left in the cache is overwritten before it is seen.
    last = hidden[torch.arange(len(prompts), device=weight.device), lengths - 1]
    out = []
    for place in range(OUTPUT_TOKENS):
        out.append(model.logits(last).argmax(-1))
        last = model.cached(out[-1][:, None], lengths + place, cache)[:, 0]
    found: list[list[int]] = torch.stack(out, 1).tolist()
    return found
