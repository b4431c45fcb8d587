"""A choice's calls are the same however its tokens arrive, also where special tokens mark them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.generation.models import GenerationModel
from radixkv.generation.output import ChoiceStream, OutputDelta
from radixkv.generation.parsers.answer_format import AnswerFormat
from radixkv.generation.parts import Part, ReasoningPart, TextPart, ToolCallPart
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import Ready, pack_tokens, unpack_tokens
from radixkv.wire.sampling import SamplingParams
from support.cases import examples
from support.small_tokenizers import byte_letters
from support.tool_formats import HEADER, USE, answer_format

MARKERS = ["<tool_call>", "</tool_call>", "<end>"]
EOS = 256 + MARKERS.index("<end>")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANSWER = f"I look.\n{CALL}\n{CALL}"
ARGUMENTS = '{"city": "Köln"}'


def model_with(folder: Path, markers: list[str], one: AnswerFormat, eos_token_id: int) -> GenerationModel:
    """Returns a model whose tokens are bytes, and markers after these."""
    backend = byte_letters(special=markers)
    backend.save(str(folder / "tokenizer.json"))
    return GenerationModel(
        ready=Ready(6, 300, 1000, 16, 100, 8, 512, "cpu", "float32"),
        tokenizer=Tokenizer.load(folder),
        answer_format=one,
        eos_token_ids=frozenset({eos_token_id}),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GenerationModel:
    folder = tmp_path_factory.mktemp("model")
    return model_with(folder, MARKERS, answer_format(folder, "hermes"), EOS)


def answer(
    model: GenerationModel, text: str, cuts: set[int], sampling: SamplingParams, finish_reason: str = "stop"
) -> tuple[OutputDelta[Any], ChoiceStream[Any]]:
    """Returns the output of a text whose tokens arrive in groups, with ids left out of calls, and the stream."""
    ids = unpack_tokens(model.require_tokenizer("text").encode(text, adds_special_tokens=False))
    (end_id,) = model.eos_token_ids
    if finish_reason == "stop" and ids[-1] != end_id:
        ids.append(end_id)
    ends = [*sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    assert model.answer_format is not None
    parser = model.answer_format.open_parser(HEADER, USE)
    stream: ChoiceStream[Any] = ChoiceStream(sampling, model, parser=parser)
    output: OutputDelta[Any] = OutputDelta()
    for begin, end in zip([0, *ends], ends, strict=False):
        is_last = end == len(ids)
        stop_id = end_id if is_last and finish_reason == "stop" else None
        output.add(stream.absorb(pack_tokens(ids[begin:end]), None, finish_reason if is_last else None, stop_id))
    output.parts = [msgspec.structs.replace(p, id="") if isinstance(p, ToolCallPart) else p for p in output.parts]
    return output, stream


WHOLE: list[Part] = [
    TextPart("I look."),
    ToolCallPart(0, "", "weather", ARGUMENTS),
    ToolCallPart(1, "", "weather", ARGUMENTS),
]


@examples(50)
@given(cuts=st.sets(st.integers(1, 200), max_size=60))
def test_calls_do_not_depend_on_how_tokens_are_grouped(model: GenerationModel, cuts: set[int]) -> None:
    for sampling in (SamplingParams(), SamplingParams(stop=("never",))):
        output, _ = answer(model, ANSWER, cuts, sampling)
        assert (output.parts, output.finish_reason, output.stop_reason) == (WHOLE, "tool_calls", None)


@examples(50)
@given(cuts=st.sets(st.integers(1, 200), max_size=60))
def test_a_stop_string_ends_an_answer_within_a_call(model: GenerationModel, cuts: set[int]) -> None:
    output, _ = answer(model, ANSWER, cuts, SamplingParams(stop=("öln",)))
    assert output.parts == [TextPart("I look."), ToolCallPart(0, "", "weather", '{"city": "K')]
    assert (output.finish_reason, output.stop_reason) == ("tool_calls", "öln")


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_cut_answer_keeps_its_reason(model: GenerationModel, reason: str) -> None:
    output, _ = answer(model, ANSWER, set(), SamplingParams(), reason)
    assert (output.parts, output.finish_reason) == (WHOLE, reason)


def test_text_without_calls_stops(model: GenerationModel) -> None:
    output, _ = answer(model, "Hello. \n", {3, 8}, SamplingParams())
    assert (output.parts, output.finish_reason) == ([TextPart("Hello. \n")], "stop")


CHANNELS = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"]
ANALYSIS = "<|channel|>analysis<|message|>I think.<|end|>"
CHANNEL_TEXT = "<|channel|>commentary<|message|>I look.<|end|>"
CHANNEL_CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"


@pytest.fixture(scope="module")
def channels_model(tmp_path_factory: pytest.TempPathFactory) -> GenerationModel:
    folder = tmp_path_factory.mktemp("channels")
    one = answer_format(folder, "openai", has_reasoning=True)
    return model_with(folder, CHANNELS, one, 256 + CHANNELS.index("<|call|>"))


@examples(50)
@given(cuts=st.sets(st.integers(1, 150), max_size=40))
def test_channels_of_special_tokens(channels_model: GenerationModel, cuts: set[int]) -> None:
    text = "<|start|>assistant".join((ANALYSIS, CHANNEL_TEXT, CHANNEL_CALL))
    output, stream = answer(channels_model, text, cuts, SamplingParams())
    assert output.parts == [
        ReasoningPart("I think."),
        TextPart("I look."),
        ToolCallPart(0, "", "weather", ARGUMENTS),
    ]
    assert output.finish_reason == "tool_calls"
    ids = unpack_tokens(channels_model.require_tokenizer("text").encode(ANALYSIS, adds_special_tokens=False))
    assert stream.n_reasoning_tokens == len(ids)
