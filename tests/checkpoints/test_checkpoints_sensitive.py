"""Tests that outputs of the tests' own checkpoint depend on the whole context, with Transformers as the engine.

One KV page of a 2,000-token prompt is replaced by a page of another prompt, as by a cache that confuses pages. Then
32 tokens are generated greedily.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from radixkv.text.tokenizer import Tokenizer

PAGE_SIZE = 16
N_PROMPT_TOKENS = 2000
N_OUTPUT_TOKENS = 32
PAGES = (0, 1, 2, 9, 20, 33, 47, 58, 64, 77, 86, 95, 104, 113, 121, 123)

Layers = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def model(sensitive: Path) -> Iterator[LlamaForCausalLM]:
    with torch.no_grad():
        yield LlamaForCausalLM.from_pretrained(sensitive, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(sensitive: Path) -> list[list[int]]:
    tokenizer = Tokenizer.load(sensitive)
    return [
        np.frombuffer(tokenizer.encode(word_problems(seed)), "<i4")[:N_PROMPT_TOKENS].tolist() for seed in range(5)
    ]


def word_problems(seed: int) -> str:
    """Returns 90 worked examples that differ in names, things and numbers."""
    rng = random.Random(seed)
    names = ("Ada", "Bruno", "Chen", "Dalia", "Emeka", "Farah", "Goran", "Hana", "Ivan", "Jun", "Kofi", "Lena")
    things = ("apples", "books", "candles", "drums", "eggs", "flags", "games", "hats", "jars", "kites", "lamps")
    examples = []
    for _ in range(90):
        name, thing = rng.choice(names), rng.choice(things)
        a, b, c = rng.randrange(2, 90), rng.randrange(2, 90), rng.randrange(2, 9)
        verb, result = rng.choice([("buys", a * c + b), ("finds", a + b * c), ("makes", a * b + c)])
        examples.append(
            f"Question: {name} has {a} {thing} and {verb} {b} more on each of {c} days. How many are there?\n"
            f"Answer: The total is {a} and {b} over {c} days, which gives {result} {thing}.\n#### {result}\n\n"
        )
    return "".join(examples)


def prefill(model: LlamaForCausalLM, tokens: list[int]) -> Layers:
    cache = model(torch.tensor([tokens]), use_cache=True).past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers]


def generate(model: LlamaForCausalLM, layers: Layers, last_token: int) -> tuple[list[int], int]:
    """Returns row 0's greedy tokens and how many other rows give the same tokens.

    Args:
        model: the model.
        layers: K and V of all prompt tokens but the last, by layer.
        last_token: the prompt's last token.

    A row that differs once is dropped.
    """
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    token = torch.full((len(layers[0][0]), 1), last_token)
    outputs = []
    for _ in range(N_OUTPUT_TOKENS):
        token = model(token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        outputs.append(int(token[0]))
        same = (token == token[0]).squeeze(1)
        if not same.all():
            cache.batch_select_indices(same.nonzero().squeeze(1))
            token = token[same]
    return outputs, len(token) - 1


def with_wrong_pages(layers: Layers, others: Layers) -> Layers:
    """Returns a batch: row 0 is unchanged, row i has page PAGES[i - 1] replaced by one of the other prompt."""
    edited = [
        (keys.repeat(len(PAGES) + 1, 1, 1, 1), values.repeat(len(PAGES) + 1, 1, 1, 1)) for keys, values in layers
    ]
    for row, page in enumerate(PAGES, start=1):
        here = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
        source = (page * 7 + 13) % (N_PROMPT_TOKENS // PAGE_SIZE)
        there = slice(source * PAGE_SIZE, (source + 1) * PAGE_SIZE)
        for tensors, other_tensors in zip(edited, others, strict=True):
            for tensor, other in zip(tensors, other_tensors, strict=True):
                tensor[row, :, here] = other[0, :, there]
    return edited


@pytest.mark.nightly
def test_one_wrong_page_changes_the_output(model: LlamaForCausalLM, prompts: list[list[int]]) -> None:
    *measured, other = prompts
    others = prefill(model, other)
    n_same = 0
    for prompt in measured:
        _, same = generate(model, with_wrong_pages(prefill(model, prompt[:-1]), others), prompt[-1])
        n_same += same
    n_pairs = len(measured) * len(PAGES)
    assert n_pairs == 64
    assert 1 - n_same / n_pairs >= 0.97


def test_right_pages_change_nothing(model: LlamaForCausalLM, prompts: list[list[int]]) -> None:
    layers = [
        (keys.repeat(3, 1, 1, 1), values.repeat(3, 1, 1, 1)) for keys, values in prefill(model, prompts[0][:-1])
    ]
    _, n_same = generate(model, layers, prompts[0][-1])
    assert n_same == 2


@pytest.mark.nightly
def test_outputs_are_varied(model: LlamaForCausalLM, prompts: list[list[int]]) -> None:
    outputs = [generate(model, prefill(model, prompt[:-1]), prompt[-1])[0] for prompt in prompts[:3]]
    assert all(len(set(output)) >= N_OUTPUT_TOKENS // 2 for output in outputs)
    assert len({tuple(output[:4]) for output in outputs}) == len(outputs)


def test_activations_and_logits_are_moderate(model: LlamaForCausalLM, prompts: list[list[int]]) -> None:
    result = model(torch.tensor([prompts[0]]), output_hidden_states=True)
    assert all(hidden.abs().max() < 100 for hidden in result.hidden_states)
    assert 1 < result.logits.std() < 4
    likeliest = result.logits[0].topk(2).values
    # A small change of the context can swap the tokens, but float32 can still tell them apart.
    assert 0.01 < (likeliest[:, 0] - likeliest[:, 1]).median() < 1
