"""Tests with the ``ToolCallingAgent`` of smolagents, which demands a call in every answer."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable

import pytest
from smolagents import ActionStep, OpenAIModel, Tool, ToolCallingAgent

from support.errands import ONE_CALL, SYSTEM, Tools


class Wrapped(Tool):
    """One of the tools, as smolagents wants it."""

    output_type = "string"
    skip_forward_signature_validation = True

    def __init__(self, function: Callable[..., str]) -> None:
        self.name, self.description = function.__name__, function.__doc__
        parameters = inspect.signature(function).parameters
        self.inputs = {name: {"type": "string", "description": name} for name in parameters}
        self.forward = function
        super().__init__()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_errand(is_streamed: bool) -> None:
    tools = Tools()
    model = OpenAIModel(
        "embedded", api_base=os.environ["SERVER"] + "/v1", api_key=os.environ["KEY"], temperature=0, max_tokens=200
    )
    agent = ToolCallingAgent(
        [Wrapped(function) for function in tools.functions],
        model,
        max_steps=3,
        verbosity_level=0,
        stream_outputs=is_streamed,
    )
    agent.prompt_templates["system_prompt"] = SYSTEM
    result = agent.run(ONE_CALL.user)
    assert tools.calls == [*ONE_CALL.calls]
    first, last = (step for step in agent.memory.steps if isinstance(step, ActionStep))
    assert all(result in first.observations for result in ONE_CALL.results)
    (call,) = last.tool_calls
    # The embedded model does not know what smolagents writes of results, so only the form of the answer is right.
    assert (call.name, call.arguments) == ("final_answer", {"answer": result})
    assert all(0 < step.token_usage.output_tokens < 200 for step in (first, last))
