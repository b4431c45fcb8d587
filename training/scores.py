"""How often the model answers right: held-out problems of each family, by the length of the prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from radixkv.bench.families.arithmetic import made_problems
from radixkv.bench.families.chat import made_chats
from radixkv.bench.families.layout import asked, worked
from radixkv.bench.families.lookup import about, made_documents
from radixkv.bench.families.problem import Problem, result_of
from radixkv.bench.families.tools import made_errands
from training.llama import Cache, Llama
from training.texts import (
    CHAT_TOKENS,
    ERRAND_TOKENS,
    FACT_TOKENS,
    PROBLEM_TOKENS,
    chat_messages,
    errand_messages,
    question_messages,
)
from training.tokenizer import BEGIN, END, END_OF_TURN, chat_message, header

SEED = 7
"""Of the problems; below ``HELD_OUT_SEEDS``' end."""
LENGTHS = (500, 1000, 2000, 4000, 7500)
OUTPUT_TOKENS = 64
_TOKENS_AT_ONCE = 1 << 19


class Case(NamedTuple):
    """A prompt, and whether a text answers it right."""

    prompt: str
    is_right: Callable[[str], bool]


def cases(family: str, n_tokens: int) -> Iterator[Case]:
    """Endless different cases with prompts of about ``n_tokens``."""
    return _FAMILIES[family](n_tokens)


def families() -> tuple[str, ...]:
    """The names of all."""
    return tuple(_FAMILIES)


def score_seeds() -> range:
    """Whose questions training must leave out."""
    return range(SEED + len(LENGTHS) * 2)


def score(
    model: Llama, tokenizer: Tokenizer, n_cases: int, lengths: Sequence[int] = LENGTHS
) -> dict[str, dict[str, float]]:
    """Percent right by family and length, greedily and with the model's own dtype. Cost: seconds on a GPU."""
    found: dict[str, dict[str, float]] = {}
    for family in families():
        found[family] = {}
        for length in lengths:
            taken = list(islice(cases(family, length), n_cases))
            texts = answers(model, tokenizer, [case.prompt for case in taken])
            rights = [case.is_right(text) for case, text in zip(taken, texts, strict=True)]
            found[family][str(length)] = round(100 * sum(rights) / n_cases, 1)
    return found


@torch.inference_mode()
def answers(model: Llama, tokenizer: Tokenizer, prompts: Sequence[str]) -> list[str]:
    """Greedy answers up to their end, or of ``OUTPUT_TOKENS``. Prompts are cut from the left to fit the model."""
    most = model.shape.context_length - OUTPUT_TOKENS
    all_ids = [encoding.ids for encoding in tokenizer.encode_batch(list(prompts), add_special_tokens=False)]
    all_ids = [ids[:1] + ids[1:][-(most - 1) :] for ids in all_ids]
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
    return torch.stack(out, 1).tolist()


def _result_case(prompt: str, problem: Problem) -> Case:
    right = result_of(problem.answer)
    return Case(prompt, lambda text: result_of(text) == right)


def _arithmetic(n_tokens: int) -> Iterator[Case]:
    problems = made_problems(SEED)
    n_shots = max(0, (n_tokens - PROBLEM_TOKENS) // PROBLEM_TOKENS)
    shots = worked(islice(made_problems(SEED + 1), n_shots))
    for problem in problems:
        yield _result_case(BEGIN + shots + asked(problem), problem)


def _lookup(n_tokens: int) -> Iterator[Case]:
    for document in made_documents(SEED, max(1, int((n_tokens - 40) / FACT_TOKENS)), 1):
        (problem,) = document.problems
        yield _result_case(BEGIN + about(document) + asked(problem), problem)


def _in_chat(n_tokens: int) -> Iterator[Case]:
    """A document as the system prompt of a chat, and one question."""
    for document in made_documents(SEED + 2, max(1, int((n_tokens - 60) / FACT_TOKENS)), 1):
        *said, _ = question_messages("Be brief and kind.\n\n" + document.text, document.problems)
        yield _result_case(_open(said), document.problems[0])


def _chat(n_tokens: int) -> Iterator[Case]:
    for chat in made_chats(SEED, max(2, n_tokens // CHAT_TOKENS)):
        *said, answer = chat_messages(chat)
        yield Case(_open(said), lambda text, right=answer["content"]: text == right)


def _tools(n_tokens: int) -> Iterator[Case]:
    """In turns, the call that a request needs, and what to say when its result has come."""
    for errand in made_errands(SEED, max(1, (n_tokens - 60) // ERRAND_TOKENS)):
        messages = errand_messages(errand)
        turn = errand.turns[-1]
        yield Case(_open(messages[:-3]), lambda text, right=turn.call: _is_same_json(text, right))
        yield Case(_open(messages[:-1]), lambda text, right=turn.answer: text == right)


def _open(messages: Sequence[dict[str, str]]) -> str:
    return BEGIN + "".join(map(chat_message, messages)) + header("assistant")


def _is_same_json(text: str, right: str) -> bool:
    try:
        return bool(json.loads(text) == json.loads(right))
    except ValueError:
        return False


_FAMILIES: dict[str, Callable[[int], Iterator[Case]]] = {
    "arithmetic": _arithmetic,
    "lookup": _lookup,
    "in_chat": _in_chat,
    "chat": _chat,
    "tools": _tools,
}
