"""Reasoning tokens are counted to the token, however tokens arrive."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.generation.models import GenerationModel
from radixkv.generation.output import ChoiceStream
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import Ready, pack_tokens, unpack_tokens
from radixkv.wire.sampling import SamplingParams
from support.cases import examples
from support.small_tokenizers import byte_letters
from support.tool_formats import HEADER, USE, answer_format

MERGES = [("<", "/"), ("t", "h"), ("th", "i"), ("thi", "n"), ("thin", "k"), (">", "Ċ")]
EOS = 256 + len(MERGES)
PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "</",
        "think",
        ">",
        "\n",
        "é",
        "a",
        "日",
        "<tool_call>",
        '{"name": "now"}',
        "</tool_call>",
    ]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GenerationModel:
    folder = tmp_path_factory.mktemp("model")
    backend = byte_letters(MERGES, ["<end>"])
    backend.save(str(folder / "tokenizer.json"))
    return GenerationModel(
        ready=Ready(6, 300, 1000, 16, 100, 8, 512, "cpu", "float32"),
        tokenizer=Tokenizer.load(folder),
        answer_format=answer_format(folder, "hermes", has_reasoning=True),
        eos_token_ids=frozenset({EOS}),
    )


def ids(model: GenerationModel, text: str) -> list[int]:
    return unpack_tokens(model.require_tokenizer("text").encode(text, adds_special_tokens=False))


def count(
    model: GenerationModel,
    tokens: list[int],
    cuts: set[int],
    *,
    prefill: str = "",
    sampling: SamplingParams | None = None,
    is_ended: bool = True,
) -> tuple[int, str]:
    """Returns the reasoning tokens of an answer whose tokens arrive in groups, and its reasoning."""
    assert model.answer_format is not None
    parser = model.answer_format.open_parser(HEADER + prefill, USE)
    stream: ChoiceStream[Any] = ChoiceStream(sampling or SamplingParams(), model, parser=parser)
    ends = [*sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    reasoning = ""
    for begin, end in zip([0, *ends], ends, strict=False):
        is_last = end == len(tokens)
        reason, stop = ("stop" if is_ended else "length", EOS if is_ended else None) if is_last else (None, None)
        reasoning += stream.absorb(pack_tokens(tokens[begin:end]), None, reason, stop).reasoning
    return stream.n_reasoning_tokens, reasoning


def defined_count(model: GenerationModel, tokens: list[int], prefill: str) -> int:
    """Returns the count by its definition, from the whole text of each prefix of the tokens."""
    tokenizer = model.require_tokenizer("text")
    texts = [(prefill + tokenizer.decode(tokens[:n])).lstrip() for n in range(len(tokens) + 1)]
    if not texts[-1].startswith("<think>") or "</think>" in texts[0]:
        return 0
    return next((n for n, text in enumerate(texts) if "</think>" in text), len(tokens))


@examples(300)
@given(
    prefill=st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n"]),
    opening=st.sampled_from(["", "<think>", "\n<think>\n"]),
    pieces=st.lists(PIECES, max_size=12),
    cuts=st.sets(st.integers(1, 60), max_size=12),
    is_ended=st.booleans(),
)
def test_the_count_is_that_of_its_definition(
    model: GenerationModel, prefill: str, opening: str, pieces: list[str], cuts: set[int], is_ended: bool
) -> None:
    tokens = ids(model, opening + "".join(pieces)) + [EOS] * is_ended
    if not tokens:
        return
    expected = defined_count(model, tokens, prefill)
    for sampling in (SamplingParams(), SamplingParams(stop=("never",))):
        arguments: dict[str, Any] = {"prefill": prefill, "sampling": sampling, "is_ended": is_ended}
        found = count(model, tokens, cuts, **arguments)
        assert found[0] == expected
        assert found == count(model, tokens, set(range(len(tokens))), **arguments)


def test_the_token_that_completes_the_end_counts(model: GenerationModel) -> None:
    answer = ids(model, "<think>a</think>\nbc")
    end = len(ids(model, "<think>a</think"))
    assert count(model, answer, set(), is_ended=False) == (end + 1, "a"), "one token has the end and a line break"
    assert count(model, ids(model, "abc <think>a</think>"), set(), is_ended=False) == (0, "")
