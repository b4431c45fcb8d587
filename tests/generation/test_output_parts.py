"""Parts of an output concatenate to the whole."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from radixkv.generation.output import OutputDelta
from radixkv.generation.parts import Part, ReasoningPart, TextPart, ToolCallPart

CALL = '{"city": "Paris"}'
WHOLE: list[Part] = [
    ReasoningPart("I look it up."),
    TextPart("Let me see. "),
    ToolCallPart(0, "call-0", "weather", CALL),
    ToolCallPart(1, "call-1", "weather", "{}"),
    TextPart("Done."),
]


def pieces(part: Part) -> list[Part]:
    """Returns the part in pieces of one character; only a call's first piece has its id and name."""
    match part:
        case ToolCallPart():
            return [
                ToolCallPart(part.index, part.id, part.name, ""),
                *(ToolCallPart(part.index, arguments=character) for character in part.arguments),
            ]
        case _:
            return [type(part)(character) for character in part.text]


@given(st.data())
def test_deltas_concatenate_to_the_whole(data: st.DataObject) -> None:
    singly = [piece for part in WHOLE for piece in pieces(part)]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(singly)))) | {len(singly)})
    output: OutputDelta[Any] = OutputDelta()
    for begin, end in zip([0, *cuts], cuts, strict=False):
        delta: OutputDelta[Any] = OutputDelta(token_ids=[begin])
        for piece in singly[begin:end]:
            delta.add_part(piece)
        output.add(delta)
    assert output.parts == WHOLE
    assert (output.text, output.reasoning) == ("Let me see. Done.", "I look it up.")
    assert [call.arguments for call in output.tool_calls] == [CALL, "{}"]


def test_a_delta_does_not_grow_when_its_part_is_continued() -> None:
    first: OutputDelta[Any] = OutputDelta()
    first.add_text("a")
    whole: OutputDelta[Any] = OutputDelta()
    whole.add(first)
    whole.add_text("b")
    assert (first.text, whole.text) == ("a", "ab")
