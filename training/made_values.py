"""Made names and typed values, so many that the model must copy them from the prompt."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from radixkv.lab.bench.workloads.templates import WORDS
from training.english import NOUNS

_CONSONANTS = "b c d f g h j k l m n p r s t v w z br dr gl kr pl sh st th tr".split()
_VOWELS = "a e i o u a e i o u ai ea ou".split()
_ENDINGS = ("", "", "", "n", "r", "s", "l", "t", "x", "nd", "ck")
_KNOWN_LISTS = ("colours", "days", "foods", "goods", "jobs", "names", "shops", "streets", "things", "towns")
_KNOWN_WORDS = tuple(word for name in _KNOWN_LISTS for word in WORDS[name])
_FIELD_WORDS = (
    "name title city street country colour size weight height width price cost total count amount level status "
    "state kind type category owner author email phone address date day month year time hour minute duration "
    "start end number code id key label note text message language currency rate score rank age job company "
    "room floor seat table item product model brand quantity speed distance temperature unit query limit "
    "page path file user group role topic subject comment reason source target priority"
).split()
"""Words that names of fields are made of."""


Schema = Mapping[str, Any]
"""A JSON schema."""


class Value(NamedTuple):
    """A value of JSON with its wording."""

    value: Any
    text: str
    """The value in a sentence."""


def made_word(rng: random.Random) -> str:
    """Returns a word of one to three random syllables."""
    syllables = (
        rng.choice(_CONSONANTS) + rng.choice(_VOWELS) + rng.choice(_ENDINGS)
        for _ in range(rng.choice((1, 2, 2, 2, 3)))
    )
    return "".join(syllables)


def field_name(rng: random.Random) -> str:
    """Returns a name of a parameter or field: one or two words, known or made, joined by an underscore."""
    words = [made_word(rng) if rng.random() < 0.25 else rng.choice(_FIELD_WORDS) for _ in range(2)]
    return "_".join(words if rng.random() < 0.3 else words[:1])


def field_names(rng: random.Random, count: int) -> list[str]:
    """Returns different names of fields."""
    names: dict[str, None] = {}
    while len(names) < count:
        names[field_name(rng)] = None
    return [*names]


def thing_name(rng: random.Random) -> str:
    """Returns a noun, known or made."""
    return made_word(rng) if rng.random() < 0.3 else rng.choice(NOUNS)


def told(value: object) -> str:
    """Returns a value as an answer tells it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return listed([str(item) for item in value]) if isinstance(value, list) else str(value)


def spoken(name: str) -> str:
    """Returns a field's name as it stands in a sentence."""
    return name.replace("_", " ")


def scalar_schema(rng: random.Random) -> Schema:
    """Returns the JSON schema of a text, a number, a truth value or one of several texts."""
    kind = rng.choices(("string", "integer", "number", "boolean", "enum"), (10, 5, 2, 3, 3))[0]
    if kind == "enum":
        return {"type": "string", "enum": [*dict.fromkeys(_word(rng) for _ in range(rng.randint(2, 4)))]}
    return {"type": kind}


def field_schema(rng: random.Random) -> Schema:
    """Returns the JSON schema of a scalar or of a list of texts or integers."""
    if rng.random() < 0.15:
        return {"type": "array", "items": {"type": rng.choice(("string", "string", "integer"))}}
    return scalar_schema(rng)


def value_of(rng: random.Random, schema: Schema) -> Value:
    """Returns a random value of a schema that ``field_schema`` returned; the schema may have a title."""
    if "enum" in schema:
        word = rng.choice(schema["enum"])
        return Value(word, word)
    match schema["type"]:
        case "string":
            text = bare_text(rng)
            return Value(text, json.dumps(text) if " " in text or rng.random() < 0.15 else text)
        case "integer":
            number = rng.randint(0, 10 ** rng.choice((1, 2, 2, 3, 4, 5)))
            return Value(number, str(number))
        case "number":
            part = rng.choice((0.5, 0.25, 0.75, rng.randint(1, 9) / 10))
            decimal = round(rng.randint(0, 99) + part, 2)
            return Value(decimal, str(decimal))
        case "boolean":
            is_true = rng.random() < 0.5
            words = rng.choice((("yes", "no"), ("true", "false")))
            return Value(is_true, words[0] if is_true else words[1])
    is_text = schema["items"]["type"] == "string"
    items = [
        _word(rng) if is_text else rng.randint(0, 10 ** rng.choice((1, 2, 3))) for _ in range(rng.randint(1, 4))
    ]
    return Value(items, listed([str(item) for item in items]))


def bare_text(rng: random.Random) -> str:
    """Returns a word, a code, a date or the like."""
    return rng.choices((_word, _code, _date, _time, _words, _email), (10, 4, 1, 1, 3, 1))[0](rng)


def listed(texts: Sequence[str]) -> str:
    """Returns an enumeration such as ``a, b and c``."""
    *others, last = texts
    return f"{', '.join(others)} and {last}" if others else last


def _word(rng: random.Random) -> str:
    word = made_word(rng) if rng.random() < 0.5 else rng.choice(_KNOWN_WORDS)
    return word.capitalize() if rng.random() < 0.3 else word


def _words(rng: random.Random) -> str:
    return " ".join(_word(rng) for _ in range(rng.choice((2, 2, 3, 4))))


def _code(rng: random.Random) -> str:
    letters = "".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=rng.randint(1, 3)))
    number = "".join(rng.choices("0123456789", k=rng.randint(2, 4)))
    return rng.choice((f"{letters}-{number}", f"{letters}{number}", f"{number}-{letters}"))


def _date(rng: random.Random) -> str:
    return f"20{rng.randint(10, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _time(rng: random.Random) -> str:
    return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"


def _email(rng: random.Random) -> str:
    return f"{made_word(rng)}@{made_word(rng)}.{rng.choice(('com', 'org', 'net'))}"
