"""Tools of agents: pure functions of their arguments and of a made world, with sentences that ask for them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixkv.lab.bench.workloads.templates import Gaps, Values, draw_values
from radixkv.lab.bench.workloads.words import (
    CORNERS,
    DAYS,
    FOODS,
    GOODS,
    JOBS,
    NAMES,
    STREETS,
    THINGS,
    TOWNS,
)

Schema = Mapping[str, Any]
"""A JSON schema."""

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}


@dataclass(frozen=True)
class Tool:
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


def one_of(*values: str) -> Schema:
    """Returns the schema of a text that is one of several."""
    return {"type": "string", "enum": list(values)}


WEATHER = Tool(
    "get_weather",
    "get the weather of a day",
    {"town": TEXT, "day": TEXT},
    {"town": TOWNS, "day": DAYS},
    ("What will the weather be in {town} on {day}?", "How is the weather on {day} in {town}?"),
    {"sky": ("sunny", "cloudy", "rainy", "windy", "foggy"), "degrees": (12, 28)},
    "On {day} it will be {sky} in {town}, with {degrees} degrees.",
)
ALARM = Tool(
    "set_alarm",
    "wake the user",
    {"day": TEXT, "time": TEXT},
    {"hour": (5, 12), "minute": ("00", "15", "30", "45"), "day": DAYS, "time": "{hour}:{minute}"},
    ("Wake me at {time} on {day}.", "Please set an alarm for {day} at {time}."),
    {"alarm": (10, 99)},
    "Alarm {alarm} is set for {day} at {time}.",
)
MESSAGE = Tool(
    "send_message",
    "send a message to a person",
    {"to": TEXT, "text": TEXT},
    {
        "to": NAMES,
        "day": DAYS,
        "food": FOODS,
        "thing": THINGS,
        "text": ("See you on {day}", "The {food} is ready", "I have the {thing}"),
    },
    ('Send {to} the message "{text}".', 'Tell {to} "{text}", please.'),
    {"minute": (10, 59), "sent": "12:{minute}"},
    "The message to {to} was sent at {sent}.",
)
STOCK = Tool(
    "count_stock",
    "count how many of an item a shop has",
    {"item": TEXT, "street": TEXT},
    {"item": GOODS, "street": STREETS},
    ("How many {item} are in the shop in {street} Street?", "Count the {item} in {street} Street."),
    {"count": (2, 99)},
    "The shop in {street} Street has {count} {item}.",
)
ORDER = Tool(
    "order",
    "order goods",
    {"item": TEXT, "count": NUMBER},
    {"item": GOODS, "count": (2, 99)},
    ("Order {count} {item}.", "We need {count} {item}, please order them."),
    {"order": (1000, 9999)},
    "The {count} {item} are ordered; the number of the order is {order}.",
)
PRICE = Tool(
    "get_price",
    "get the price of an item",
    {"item": TEXT},
    {"item": THINGS},
    ("What does the {item} cost?", "Tell me the price of the {item}."),
    {"price": (2, 990)},
    "The {item} costs {price} coins.",
)
LIGHT = Tool(
    "set_light",
    "turn a light on or off",
    {"room": TEXT, "state": one_of("on", "off")},
    {"room": CORNERS, "state": ("on", "off")},
    ("Turn the light in the {room} {state}.", "Light {state} in the {room}, please."),
    {},
    "The light in the {room} is {state} now.",
)
HEATING = Tool(
    "set_heating",
    "heat a room",
    {"room": TEXT, "degrees": NUMBER},
    {"room": CORNERS, "degrees": (12, 28)},
    ("Heat the {room} to {degrees} degrees.", "I want {degrees} degrees in the {room}."),
    {"minutes": (5, 60)},
    "The {room} will have {degrees} degrees in {minutes} minutes.",
)
TRAIN = Tool(
    "find_train",
    "find the first train of a day",
    {"from": TEXT, "to": TEXT, "day": TEXT},
    {("from", "to"): TOWNS, "day": DAYS},
    (
        "When does the first train from {from} to {to} leave on {day}?",
        "Find a train to {to} from {from} on {day}.",
    ),
    {"hour": (6, 22), "minute": (10, 59), "time": "{hour}:{minute}", "platform": (1, 12)},
    "The train from {from} to {to} leaves at {time} from platform {platform}.",
)
PERSON = Tool(
    "find_person",
    "find where a person lives and works",
    {"name": TEXT},
    {"name": NAMES},
    ("Who is {name}?", "Find {name}."),
    {"town": TOWNS, "job": JOBS},
    "{name} is a {job} and lives in {town}.",
)
SEARCH = Tool(
    "find_thing",
    "find the room where a thing is",
    {"thing": TEXT},
    {"thing": THINGS},
    ("Where is the {thing}?", "Find the {thing}."),
    {"room": CORNERS},
    "The {thing} is in the {room}.",
)
TABLE = Tool(
    "book_table",
    "book a table for dinner",
    {"day": TEXT, "hour": NUMBER, "guests": NUMBER},
    {"day": DAYS, "hour": (5, 10), "guests": (2, 9)},
    ("Book a table for {guests} at {hour} on {day}.", "We are {guests}; book dinner on {day} at {hour}."),
    {"table": (1, 40)},
    "Table {table} is booked for {guests} on {day} at {hour}.",
)
CALENDAR = Tool(
    "read_calendar",
    "read the user's first event of a day",
    {"day": TEXT},
    {"day": DAYS},
    ("What do I have to do on {day}?", "Read my calendar of {day}."),
    {
        "event": ("breakfast", "a lesson", "a visit", "a walk", "a meeting", "a flight"),
        "hour": (6, 12),
        "minute": ("00", "15", "30", "45"),
        "time": "{hour}:{minute}",
    },
    "On {day} you have {event} at {time}.",
)
RECIPE = Tool(
    "plan_meal",
    "plan a meal for guests",
    {"food": TEXT, "guests": NUMBER},
    {"food": FOODS, "guests": (2, 30)},
    ("Plan {food} for {guests} guests.", "I want to cook {food} for {guests}."),
    {"grams": (200, 990), "minutes": (10, 90)},
    "For {guests} you need {grams} grams of {food} and {minutes} minutes.",
)

TOOLS = (
    WEATHER,
    ALARM,
    MESSAGE,
    STOCK,
    ORDER,
    PRICE,
    LIGHT,
    HEATING,
    TRAIN,
    PERSON,
    SEARCH,
    TABLE,
    CALENDAR,
    RECIPE,
)
