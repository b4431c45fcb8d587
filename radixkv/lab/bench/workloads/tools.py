"""Tools of agents: pure functions of their arguments and of a made world, with sentences that ask for them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import msgspec

from radixkv.lab.bench.workloads.templates import Gaps, Values, draw_values, read_templates

Schema = Mapping[str, Any]
"""A JSON schema."""


class Tool(msgspec.Struct, frozen=True):
    """A tool with a template of requests that need it."""

    name: str
    purpose: str
    """What the tool does, in the imperative, such as ``order goods``."""
    parameters: Mapping[str, Schema]
    """The JSON schema of each parameter; all are required."""
    gaps: Gaps
    """The values of a request; those with the names of parameters are the arguments of the call."""
    users: tuple[str, ...]
    """Wordings of the request."""
    results: Gaps
    """What a call returns; none: that it is done."""
    answer: str
    """The answer to the user, from arguments and results."""

    @property
    def definition(self) -> dict[str, Any]:
        """The tool in OpenAI's format."""
        schema = {"type": "object", "properties": dict(self.parameters), "required": list(self.parameters)}
        function = {"name": self.name, "description": f"{self.purpose.capitalize()}.", "parameters": schema}
        return {"type": "function", "function": function}

    def run(self, arguments: object, world: str) -> Values:
        """Returns the result of a call; equal arguments give equal results in the same world.

        Arguments other than those of the parameters give an ``error``, as a real tool's would.
        """
        if not isinstance(arguments, dict) or arguments.keys() != self.parameters.keys():
            return {"error": f"{self.name} takes {', '.join(self.parameters)}"}
        if not self.results:
            return {"done": True}
        rng = random.Random(f"{world} {self.name} {json.dumps(arguments, sort_keys=True)}")
        values = draw_values(rng, self.results)
        return {name: value for name, value in values.items() if f"{{{name}}}" in self.answer}

    def arguments(self, values: Values) -> Values:
        """Returns the arguments of a call that these values of the gaps ask for."""
        return {name: values[name] for name in self.parameters}


TOOLS = read_templates("tools", Tool)
