"""Answers in parts, cut into any pieces, for the writers of APIs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hypothesis import strategies as st

from radixkv.errors import RequestError
from radixkv.generation.output import OutputDelta
from radixkv.generation.parts import Part, ReasoningPart, TextPart, ToolCallPart

_TEXT = st.text(alphabet='ab {}"\\é😀\n</>', min_size=1, max_size=12)
_ARGUMENTS = st.sampled_from(["{}", '{"a": "}{"}', '{"text": "é \\" </tool_call>", "n": [1, 2]}'])


@st.composite
def pieces(draw: st.DrawFn) -> list[OutputDelta[None]]:
    """Returns the deltas of an answer, each with pieces of parts, and the last with the end."""
    kinds = draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=5))
    parts: list[Part] = []
    n_calls = 0
    for kind, before in zip(kinds, [None, *kinds], strict=False):
        if kind == "call":
            parts += _call_pieces(draw, n_calls)
            n_calls += 1
        elif kind != before:
            make = TextPart if kind == "text" else ReasoningPart
            parts += [make(piece) for piece in draw(st.lists(_TEXT, min_size=1, max_size=3))]
    deltas: list[OutputDelta[None]] = [OutputDelta(token_ids=[1])]
    for part in parts:
        if draw(st.booleans()):
            deltas.append(OutputDelta(token_ids=[1]))
        deltas[-1].parts.append(part)
    finish_reason = draw(st.sampled_from(["stop", "length", "tool_calls"]))
    deltas.append(OutputDelta(token_ids=[1], finish_reason=finish_reason))
    return deltas


def _call_pieces(draw: st.DrawFn, index: int) -> list[Part]:
    arguments = draw(_ARGUMENTS)
    cuts = sorted(draw(st.sets(st.integers(0, len(arguments)), max_size=4)))
    texts = [arguments[start:end] for start, end in zip([0, *cuts], [*cuts, len(arguments)], strict=True)]
    first, *rest = texts
    return [
        ToolCallPart(index, f"call_{index}", "f", first),
        *[ToolCallPart(index, arguments=text) for text in rest],
    ]


class ScriptedAnswer:
    """Replaces ``SingleAnswer`` with an answer of given deltas."""

    id = "0f"
    ends_with_context = False
    n_prompt, n_cached, n_written, n_output, n_reasoning = 40, 16, 16, 7, 3
    stored_fields: Mapping[str, dict[str, int]] = MappingProxyType({})
    eviction_fields: Mapping[str, dict[str, int]] = MappingProxyType({})

    def __init__(self, deltas: Sequence[OutputDelta[None]], error: RequestError | None = None) -> None:
        self._deltas = deltas
        self._error = error

    async def nonempty_outputs(self, *, streams: bool) -> AsyncGenerator[OutputDelta[None], None]:
        """Yields the deltas, and then raises the error, if there is one."""
        for delta in self._deltas:
            yield delta
        if self._error is not None:
            raise self._error

    async def whole(self) -> OutputDelta[None]:
        """Returns the deltas as one."""
        whole: OutputDelta[None] = OutputDelta()
        for delta in self._deltas:
            whole.add(delta)
        return whole


def collect(events: AsyncGenerator[bytes, None]) -> list[dict[str, Any]]:
    """Returns the data of a stream's events; checks that each is named as its data says."""

    async def read() -> bytes:
        return b"".join([event async for event in events])

    found = []
    for event in asyncio.run(read()).split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        found.append(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
    return found
