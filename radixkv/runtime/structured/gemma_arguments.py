"""Grammars of a call's arguments in Gemma 4's notation, made of JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import xgrammar

from radixkv.runtime.structured.json_schema import refusal

STYLE = "gemma"
"""The style of a JSON schema in a structural tag whose values are written in this notation."""
QUOTE = '<|"|>'
"""Stands before and after a text, in which nothing is escaped. In Gemma's vocabulary it is a special token."""

Schema = Mapping[str, Any]
Rest = str | None
"""Expression of how an object goes on; None if it cannot."""

_BEYOND_ASCII = r"[\u0080-\u07ff]|[\u0800-\ud7ff]|[\ue000-\uffff]|[\u{10000}-\u{10ffff}]"
"""A pattern of letters, by the length of their UTF-8: of longer ranges, xgrammar allows bytes that are no UTF-8."""


def _except(letters: str) -> str:
    """Returns a pattern of any letter but some of ASCII, in their order."""
    starts = (0, *(ord(one) + 1 for one in letters))
    ends = (*(ord(one) - 1 for one in letters), 0x7F)
    ranges = "".join(f"\\x{low:02x}-\\x{high:02x}" for low, high in zip(starts, ends, strict=True))
    return f"([{ranges}]|{_BEYOND_ASCII})"


_BEGUN = r'<(<|\|<|\|"<|\|"\|<)*'
"""A pattern of the beginning of a quote's first character, which may begin anew."""
_NO_QUOTE = _BEGUN + "".join(
    ("(", _except("<|"), r"|\|", _except('"<'), r'|\|"', _except("<|"), r'|\|"\|', _except("<>"), ")")
)
_TEXT = rf'({_except("<")}|{_NO_QUOTE})*({_BEGUN}(\||\|"|\|"\|)?)?'
_LETTERS = f"Regex({json.dumps(_TEXT)})"
"""An expression of texts without a quote: one automaton, so that masks can be prepared."""
_WORD = re.compile(r'[^,:{}\[\]<"]+')
"""A key that is read without quotes, if there is no white space around it."""
_NO_WORD = ',:{}[\\]<\\"\\0-\\x20\\x7f-\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000'
"""What is in no key that an object does not declare, in a class of characters; a space is within one."""
_BEFORE_VALUE = r"(=[\-0-9tfnN{[<\"])"
"""What a value may begin with. With it, filling a mask within a key takes a tenth of the time."""
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|[A-Za-z_]\w*')
"""A text, a class of characters or a word in the notation in which xgrammar prints grammars."""
_ESCAPED = re.compile(r' \| \("\\\\"[^()]*\)')
"""An alternative that begins with a backslash."""


def gemma_grammar(schema: Schema, quote_token: int | None) -> str:
    """Returns EBNF whose sentences are values in Gemma 4's notation, each of which the schema accepts.

    Values are written as Gemma's chat template does: without white space, and an object's declared keys in the
    order of their names. Other keys come after them. O(size of the schema), and the square of the number of
    properties where the schema limits it.

    Args:
        schema: a prepared JSON schema.
        quote_token: id of ``QUOTE``; None if it is no special token.

    Raises:
        InvalidRequest: an object or array accepts nothing.
        RuntimeError: xgrammar refuses limits, a format or a pattern.
    """
    return _GemmaGrammar(schema.get("$defs", {}), quote_token).write(schema)


class _GemmaGrammar:
    """The rules of one grammar."""

    def __init__(self, definitions: Schema, quote_token: int | None) -> None:
        self._definitions = definitions
        self._quote = json.dumps(QUOTE) if quote_token is None else f"Token({quote_token})"
        self._rules: dict[str, str] = {}
        self._scalars: dict[str, str] = {}
        """Names of the rules for schemas of numbers and texts, by their JSON."""
        self._pending: list[tuple[str, Callable[[], str]]] = []
        """Rules that are named and not made yet: one may refer to itself, and a long chain would be too deep."""

    def write(self, schema: Schema) -> str:
        self._later("root", lambda: self._value(schema))
        while self._pending:
            name, make = self._pending.pop()
            self._rules[name] = make()
        return "\n".join(f"{name} ::= {body}" for name, body in self._rules.items())

    def _value(self, schema: Schema) -> str:
        """Returns an expression of the values of a schema."""
        match schema:
            case {"$ref": str(reference)}:
                name = reference.rpartition("/")[2]
                return self._later(f"definition_{name}", lambda: self._value(self._definitions[name]))
            case {"anyOf": [*options]}:
                return self._rule(_any_of(map(self._value, options)))
            case {"enum": [*values]}:
                return self._rule(_any_of(map(self._constant, values)))
            case {"type": "array"}:
                return self._array(schema)
            case {"type": "object"}:
                return self._object(schema)
            case {"type": "string", **limits}:
                return self._scalar(schema) if limits else self._any_text()
            case {"type": "number" | "integer"}:
                return self._scalar(schema)
            case {"type": "boolean"}:
                return '("true" | "false")'
            case {"type": "null"}:
                return self._constant(None)
        return self._named("any", self._any)

    def _later(self, name: str, make: Callable[[], str]) -> str:
        """Does what ``_named`` does, but makes the rule after this one."""
        if name not in self._rules:
            self._rules[name] = ""
            self._pending.append((name, make))
        return name

    def _named(self, name: str, make: Callable[[], str]) -> str:
        """Returns a rule's name, after making the rule if there is none."""
        if name not in self._rules:
            self._rules[name] = ""  # which the rule may refer to
            self._rules[name] = make()
        return name

    def _rule(self, body: str) -> str:
        """Returns the name of a new rule."""
        return self._named(f"rule_{len(self._rules)}", lambda: body)

    def _any(self) -> str:
        types: list[Schema] = [{"type": kind} for kind in ("string", "number", "boolean", "null")]
        types += [{"type": "array", "items": {}}, {"type": "object", "additionalProperties": {}}]
        return _any_of(map(self._value, types))

    def _any_text(self) -> str:
        return self._named(
            "text", lambda: f"{self._quote} {self._named('letters', lambda: _LETTERS)} {self._quote}"
        )

    def _scalar(self, schema: Schema) -> str:
        """Returns the rule of numbers or texts with limits, which xgrammar makes."""
        text = json.dumps(schema)
        if text not in self._scalars:
            self._scalars[text] = self._named(
                name := f"scalar_{len(self._rules)}", lambda: self._copied(schema, name)
            )
        return self._scalars[text]

    def _copied(self, schema: Schema, prefix: str) -> str:
        """Returns the body of xgrammar's rule for a schema, after adding the rules that it refers to.

        xgrammar writes a text in JSON's quotes. They are replaced; between them, what JSON escapes is left out.
        """
        printed = str(xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False))
        rules = dict(line.split(" ::= ", 1) for line in printed.split("\n") if " ::= " in line)
        if schema["type"] == "string":
            found = re.fullmatch(r'\(\("\\"" (.*) "\\""\)\)', rules["root"])
            if found is None:
                raise RuntimeError(f"no text stands between quotes in {rules['root']}")
            rules["root"] = f"{self._quote} {found[1]} {self._quote}"

        def renamed(piece: re.Match[str]) -> str:
            if piece[0] not in rules:
                return piece[0]
            return self._named(f"{prefix}_{piece[0]}", lambda: copy(piece[0]))

        def copy(name: str) -> str:
            return _PIECE.sub(renamed, _ESCAPED.sub("", rules[name]))

        return copy("root")

    def _constant(self, value: Any) -> str:
        """Returns an expression of one value."""
        match value:
            case None:
                return '("null" | "None")'  # the second is what the chat template writes
            case str():
                return self._quoted(value)
            case list():
                return _joined('"["', ' "," '.join(map(self._constant, value)), '"]"')
            case dict():
                items = (f"{self._key(name)} {self._constant(value[name])}" for name in _in_order(value))
                return _joined('"{"', ' "," '.join(items), '"}"')
        return json.dumps(json.dumps(value))

    def _quoted(self, text: str) -> str:
        if QUOTE in text:  # JSON's quotes are read, too
            return json.dumps(json.dumps(text, ensure_ascii=False), ensure_ascii=False)
        return _joined(self._quote, json.dumps(text, ensure_ascii=False) if text else "", self._quote)

    def _key(self, name: str) -> str:
        if _is_word(name):
            return json.dumps(f"{name}:", ensure_ascii=False)
        return f'{self._quoted(name)} ":"'

    def _array(self, schema: Schema) -> str:
        first = [self._value(one) for one in schema.get("prefixItems", ())]
        fewest = max(schema.get("minItems", 0) - len(first), 0)
        most = schema.get("maxItems")
        if most is not None:
            most -= len(first)
        if schema["items"] is False:
            most = 0 if most is None else min(most, 0)
        if most is not None and most < fewest:
            raise refusal("$", "has an array whose number of items cannot be that of its limits")
        others = "" if most == 0 else _repeated(self._value(schema["items"]), fewest, most, is_first=not first)
        return self._rule(_joined('"["', ' "," '.join(first), others, '"]"'))

    def _object(self, schema: Schema) -> str:
        properties = schema.get("properties", {})
        others = self._others(schema, properties)
        fewest, most = schema.get("minProperties", 0), schema.get("maxProperties")
        # The largest count stands for itself and all above, unless these differ.
        largest = len(properties) if fewest > 1 or most is not None else min(1, len(properties))
        rests = {count: _end(others, count, fewest, most) for count in range(largest + 1)}
        for index, name in reversed([*enumerate(_in_order(properties))]):
            item = f"{self._key(name)} {self._value(properties[name])}"
            is_required = name in schema.get("required", ())
            for count in range(min(index, largest) + 1):  # each needs the next one of the properties after this
                following = rests[min(count + 1, largest)]
                ways = [] if following is None else [f"{_comma(count)} {item} {following}"]
                if not is_required and (rest := rests[count]) is not None:
                    ways.append(rest)
                way = " | ".join(ways)
                # Where nothing was written yet, all ways are in one rule: xgrammar prepares masks for each rule.
                rests[count] = (self._rule(way) if count else way) if ways else None
        if rests[0] is None:
            raise refusal("$", "has an object whose number of properties cannot be that of its limits")
        return self._rule(f'"{{" ({rests[0]})')

    def _others(self, schema: Schema, properties: Schema) -> str | None:
        """Returns an expression of a key that is not declared, and its value; None if there may be none."""
        match schema:
            case {"patternProperties": dict(patterns)}:
                ((pattern, value),) = patterns.items()
                return f'{self._scalar({"type": "string", "pattern": pattern})} ":" {self._value(value)}'
            case {"propertyNames": dict(names)}:
                return f"{self._names(names)} {self._value({})}"
            case {"additionalProperties": dict(value)}:
                return f"{self._new_word(properties)} {self._value(value)}"
        return None

    def _names(self, schema: Schema) -> str:
        """Returns an expression of the keys that a schema of names accepts, with the colon."""
        match schema:
            case {"$ref": str(reference)}:
                name = reference.rpartition("/")[2]
                return self._later(f"names_{name}", lambda: self._names(self._definitions[name]))
            case {"anyOf": [*options]}:
                return _any_of(map(self._names, options))
            case {"enum": [*values]} if all(isinstance(one, str) for one in values):
                return _any_of(map(self._key, values))
            case {"type": "string", **limits}:
                return f'{self._scalar(schema)} ":"' if limits else self._new_word({})
        raise refusal("$", "has propertyNames that accept values other than strings")

    def _new_word(self, declared: Iterable[str]) -> str:
        """Returns a rule of keys without quotes other than the declared ones, with the colon."""
        word = self._named("word", lambda: f'([^{_NO_WORD}] word | ":" | " " gap) {_BEFORE_VALUE}')
        gap = self._named("gap", lambda: f'([^{_NO_WORD}] word | " " gap) {_BEFORE_VALUE}')
        next_nodes: list[dict[str, int]] = [{}]
        ends = {0}
        for name in filter(_is_word, declared):
            node = 0
            for letter in name:
                if letter not in next_nodes[node]:
                    next_nodes[node][letter] = len(next_nodes)
                    next_nodes.append({})
                node = next_nodes[node][letter]
            ends.add(node)
        prefix = f"key_{len(self._rules)}"
        letters = [""] * len(next_nodes)
        for following in next_nodes:
            for letter, after in following.items():
                letters[after] = letter
        for node, following in enumerate(next_nodes):
            ways = [f"{json.dumps(one, ensure_ascii=False)} {prefix}_{after}" for one, after in following.items()]
            ways.append(f"[^{_NO_WORD}{''.join(map(_in_class, following))}] {word}")
            if node and " " not in following:
                ways.append(f'" " {gap}')
            if node not in ends and letters[node] != " ":
                ways.append('":"')
            self._rules[f"{prefix}_{node}"] = f"({' | '.join(ways)}) {_BEFORE_VALUE}"
        return f"{prefix}_0"


def _end(others: str | None, count: int, fewest: int, most: int | None) -> Rest:
    """Returns how an object ends after all declared properties, of which it has some."""
    fewest = max(fewest - count, 0)
    if most is not None:
        most -= count
    if others is None:
        most = 0 if most is None else min(most, 0)
    if most is not None and most < fewest:
        return None
    return _joined("" if most == 0 else _repeated(others or "", fewest, most, is_first=not count), '"}"')


def _repeated(item: str, fewest: int, most: int | None, *, is_first: bool) -> str:
    """Returns an expression of items with commas between them, and before the first one unless it is the first."""
    if is_first:
        more = _repeated(item, max(fewest - 1, 0), None if most is None else most - 1, is_first=False)
        return f"{item} {more}" if fewest else f'({item} {more} | "")'
    return "" if most == 0 else f'("," {item}){{{fewest},{"" if most is None else most}}}'


def _in_order(names: Iterable[str]) -> list[str]:
    """Returns names in the order in which chat templates write them."""
    return sorted(names, key=str.lower)


def _is_word(name: str) -> bool:
    """Returns whether a key is read without quotes."""
    return _WORD.fullmatch(name) is not None and name == name.strip()


def _in_class(letter: str) -> str:
    """Returns a letter as part of a class of characters."""
    return f"\\x{ord(letter):02x}" if letter.isascii() else letter


def _comma(count: int) -> str:
    return '","' if count else ""


def _any_of(options: Iterable[str]) -> str:
    return f"({' | '.join(dict.fromkeys(options))})"


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
