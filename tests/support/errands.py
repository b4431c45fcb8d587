"""Errands for the agents of client libraries: tools whose results are known, and what an agent must do with them.

The wording is that of the workload ``agents``, on which the embedded model was trained. Only the standard library
and pytest are imported, because the scripts of tests/clients run without radixkv.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

SYSTEM = "You run errands with your tools."

_PEOPLE = {"Nora": {"town": "Corvale", "job": "baker"}, "Idris": {"town": "Farlow", "job": "pilot"}}
_WEATHER = {
    ("Corvale", "Friday"): {"sky": "foggy", "degrees": 17},
    ("Hartwell", "Monday"): {"sky": "windy", "degrees": 23},
}
_PRICES = {"lantern": {"price": 385}, "violin": {"price": 642}}


@dataclass
class Tools:
    """The tools of one agent, which note their calls."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Name and arguments of each call so far."""

    def find_person(self, name: str) -> str:
        """Find where a person lives and works."""
        return self._run("find_person", {"name": name}, _PEOPLE.get(name))

    def get_weather(self, town: str, day: str) -> str:
        """Get the weather of a day."""
        return self._run("get_weather", {"town": town, "day": day}, _WEATHER.get((town, day)))

    def get_price(self, item: str) -> str:
        """Get the price of an item."""
        return self._run("get_price", {"item": item}, _PRICES.get(item))

    @property
    def functions(self) -> list[Callable[..., str]]:
        """All tools, with the docstrings and annotations that libraries make schemas of."""
        return [self.find_person, self.get_weather, self.get_price]

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        """Calls a tool by its name."""
        return {tool.__name__: tool for tool in self.functions}[name](**arguments)

    def _run(self, name: str, arguments: dict[str, Any], result: dict[str, Any] | None) -> str:
        self.calls.append((name, arguments))
        return json.dumps({"error": "unknown"} if result is None else result)


@dataclass(frozen=True)
class Errand:
    """A message of a user, and what an agent must do about it."""

    user: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    """The calls that are needed."""
    results: tuple[str, ...]
    """What the answer must contain."""

    def check(self, tools: Tools, answer: str) -> None:
        """Fails unless the tools were called as needed, in any order, and the answer has the results."""
        assert sorted(tools.calls, key=repr) == sorted(self.calls, key=repr)
        assert all(result in answer for result in self.results), answer


ONE_CALL = Errand(
    "What will the weather be in Hartwell on Monday?",
    (("get_weather", {"town": "Hartwell", "day": "Monday"}),),
    ("windy", "23"),
)
TWO_CALLS_AT_ONCE = Errand(
    "Who is Idris? Also: What does the lantern cost?",
    (("find_person", {"name": "Idris"}), ("get_price", {"item": "lantern"})),
    ("pilot", "Farlow", "385"),
)
TWO_CALLS_IN_A_ROW = Errand(
    "Find out where Nora lives, then tell me the weather there on Friday.",
    (("find_person", {"name": "Nora"}), ("get_weather", {"town": "Corvale", "day": "Friday"})),
    ("baker", "Corvale", "foggy", "17"),
)
PARCEL = (
    "Extract the parcel as a JSON object with the keys colour and count.\n\nThe colour is red. Its count is 12."
)
"""A question whose answer is a structure: the colour red and the count 12."""
ERRANDS = (ONE_CALL, TWO_CALLS_AT_ONCE, TWO_CALLS_IN_A_ROW)
_WITH_EVERY_CHANGE = (
    (ONE_CALL, False, False),
    (ONE_CALL, True, True),
    (TWO_CALLS_AT_ONCE, False, True),
    (TWO_CALLS_AT_ONCE, True, False),
    (TWO_CALLS_IN_A_ROW, False, False),
    (TWO_CALLS_IN_A_ROW, True, True),
)
"""All pairs of two values occur."""
ERRANDS_WITH_SETTINGS = [
    pytest.param(*values, marks=[] if values in _WITH_EVERY_CHANGE else pytest.mark.nightly)
    for values in product(ERRANDS, (False, True), (False, True))
]
"""Each errand, whether the answer is streamed, and whether the model reasons: half of all run only at night."""


def definitions() -> list[dict[str, Any]]:
    """Returns the tools in OpenAI's chat format."""
    return [{"type": "function", "function": _definition(tool)} for tool in Tools().functions]


def _definition(tool: Callable[..., str]) -> dict[str, Any]:
    names = list(inspect.signature(tool).parameters)
    properties = {name: {"type": "string"} for name in names}
    schema = {"type": "object", "properties": properties, "required": names}
    return {"name": tool.__name__, "description": tool.__doc__, "parameters": schema}
