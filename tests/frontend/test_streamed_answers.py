"""The pump of answers, between a runtime and what writes a response."""

from __future__ import annotations

import uuid
from contextlib import aclosing
from pathlib import Path

import pytest

from radixkv.frontend.answers import Answers, PromptAnswers
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.runtime_client import RuntimeClient
from radixkv.frontend.served_model import ServedModel
from radixkv.runtime.process import RuntimeServer
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import Submit
from radixkv.wire.sampling import SamplingParams
from support.scripted_runtime import ScriptedLoop
from support.threaded_runtime import run


class Sink:
    """Keeps the parts that are written."""

    def __init__(self, *, is_full: bool) -> None:
        self.is_full = is_full
        self.parts: list[bytes] = []

    def write_part(self, part: bytes) -> None:
        self.parts.append(part)


@pytest.mark.parametrize("is_full", [False, True])
def test_output_is_written_to_a_sink_with_room_and_otherwise_yielded(
    tmp_path: Path, served_model: ServedModel, tokenizer: Tokenizer, is_full: bool
) -> None:
    async def test(client: RuntimeClient, server: RuntimeServer) -> None:
        submit = Submit(uuid.uuid4().hex, tokenizer.encode("abc"), SamplingParams(max_tokens=12))
        answers = Answers([PromptAnswers(submit, served_model)], client, Arrival(0.0))
        sink = Sink(is_full=is_full)
        yielded: list[str] = []
        async with aclosing(answers.deltas_and_outputs(streams=True)) as outputs:
            async for delta, output in outputs:
                if not yielded:
                    answers.write_directly(sink, lambda _, output: output.text.encode())
                elif not is_full:
                    assert delta.done is not None, "only the end is left"
                yielded.append(output.text)
        written = b"".join(sink.parts).decode()
        assert yielded[0] + written + "".join(yielded[1:]) == "abc" * 4
        assert not (is_full and written)

    run(tmp_path, ScriptedLoop(step_s=0.005), test)
