"""What grammars of Gemma 4's notation allow is read as values of the schema, and they allow all that is written."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from radixkv.errors import InvalidRequest
from radixkv.generation.parsers.gemma_calls import GemmaCallReader
from radixkv.runtime.structured.compiler import Compiler
from radixkv.runtime.structured.gemma_arguments import QUOTE
from radixkv.runtime.structured.matcher import Grammar, Matcher
from radixkv.runtime.structured.source import prepare_source
from radixkv.runtime.structured.vocabulary import Vocabulary
from radixkv.text.chat_template import ChatTemplate
from radixkv.wire.structured_outputs import StructuredOutputs
from support.cases import rest_nightly
from support.chat_templates import GEMMA_4
from support.grammar_walks import Walker, tiny_vocabulary
from support.json_schemas import MadeSchema, Schema, closed, corpus

MAX_TOKENS = 300
_MARK = b"\xff" + QUOTE.encode()
_TEMPLATE = ChatTemplate(GEMMA_4, {"bos_token": ""}, "the test")


def vocabulary(*, has_special_quote: bool) -> Vocabulary:
    """Returns the embedded model's tokens and one more: the quote, as a special token or as a text."""
    tiny = tiny_vocabulary()
    quote = _MARK if has_special_quote else QUOTE.encode()
    return msgspec.structs.replace(tiny, tokens=[*tiny.tokens, quote, *[b""] * 31])


class Tools:
    """Compiles grammars and walks through them."""

    def __init__(self, *, has_special_quote: bool) -> None:
        self.vocabulary = vocabulary(has_special_quote=has_special_quote)
        self.quote = len(self.vocabulary.tokens) - 32
        self.walker = Walker(self.vocabulary, frozenset(b"}],:" + self.vocabulary.tokens[self.quote]))
        self._compiler = Compiler(self.vocabulary, n_threads=1, cache_bytes=64 << 20)

    def compiled(self, schema: Any) -> Grammar:
        part = {"type": "json_schema", "json_schema": schema, "style": "gemma"}
        tag = {"type": "structural_tag", "format": part}
        source = prepare_source(StructuredOutputs(structural_tag=json.dumps(tag)))
        return Grammar(self._compiler.compile(source))

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Returns whether a text is a whole value. Quotes are the quote's token."""
        matcher = grammar.new_matcher()
        pieces = re.split(f"({re.escape(QUOTE)})", text)
        return (
            all(self._accept(matcher, piece.encode(), is_quote=bool(i % 2)) for i, piece in enumerate(pieces))
            and matcher.is_complete
        )

    def _accept(self, matcher: Matcher, text: bytes, *, is_quote: bool) -> bool:
        if is_quote:
            return matcher.accept(self.quote)
        single = (self.vocabulary.tokens.index(bytes([one])) for one in text)
        return all(map(matcher.accept, single))


QUOTES = ["special quote", "plain quote"]


@pytest.fixture(scope="module", params=[True, False], ids=QUOTES)
def tools(request: pytest.FixtureRequest) -> Tools:
    return Tools(has_special_quote=request.param)


def read(text: str) -> Any:
    """Returns the value that the parser of calls reads."""
    reader = GemmaCallReader()
    pieces = reader.feed(f"call:f{{value:{text}}}")
    assert not reader.unread
    assert not reader.is_in_string
    return json.loads("".join(piece.arguments for piece in pieces))["value"]


@pytest.mark.nightly
@pytest.mark.parametrize("tools", rest_nightly([True, False], kept=(0,)), indirect=True, scope="module", ids=QUOTES)
@pytest.mark.parametrize("n_walks", rest_nightly([1, 8], kept=(0,)))
def test_every_value_that_ends_is_read_as_one_of_the_schema(tools: Tools, n_walks: int) -> None:
    n_ended, schemas = 0, corpus()
    for index, schema in enumerate(schemas):
        grammar, validator = tools.compiled(schema), Draft202012Validator(schema)
        for seed in range(n_walks):
            walk = tools.walker.walk(grammar, random.Random(f"{index} {seed}"), MAX_TOKENS)
            if walk.has_ended and _is_utf8(encoded := walk.text.replace(b"\xff", b"")):
                text = encoded.decode()
                error = next(validator.iter_errors(read(text)), None)
                assert error is None, f"{text!r} is not valid by {schema}: {error}"
                n_ended += 1
    assert n_ended > 0.9 * n_walks * len(schemas)


def rendered(value: Any) -> str:
    """Returns a value as the chat template writes it in a call."""
    call = {"function": {"name": "f", "arguments": {"value": value}}}
    messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = _TEMPLATE.render(messages, add_generation_prompt=False)
    return text.partition("call:f{value:")[2].rpartition("}<tool_call|>")[0]


class MadeValue:
    """Makes values of a schema that ``MadeSchema`` made, or of a written one of this file."""

    def __init__(self, root: Schema, choices: random.Random) -> None:
        self._root, self._choices = root, choices

    def of(self, schema: Schema, depth: int = 0) -> Any:
        choose = self._choices
        match schema:
            case {"$ref": str(reference)}:
                name = reference.rpartition("/$defs/")[2].replace("~1", "/").replace("~0", "~")
                return self.of(self._root["$defs"][name], depth)
            case {"const": value}:
                return value
            case {"enum": values}:
                return choose.choice(values)
            case {"anyOf": options} | {"oneOf": options}:
                return self.of(options[-1] if depth > 4 else choose.choice(options), depth + 1)
            case {"type": list(kinds)}:
                return self.of({**schema, "type": choose.choice(kinds)}, depth)
            case {"type": "object"}:
                return self._object(schema, depth)
            case {"type": "array"}:
                first = [self.of(one, depth + 1) for one in schema.get("prefixItems", ())]
                least = max(schema.get("minItems", 0), len(first))
                most = max(least, min(schema.get("maxItems", 3), 3 if depth < 4 else 0))
                items = schema.get("items", {"type": "string"})
                n = choose.randint(least, most) - len(first)
                return first + [self.of(items, depth + 1) for _ in range(n)]
            case {"type": "boolean"}:
                return choose.random() < 0.5
            case {"type": "null"}:
                return None
            case {"type": "integer"}:
                step = schema.get("multipleOf", 1)
                low = schema.get("minimum", schema.get("exclusiveMinimum", -3) + 1)
                return choose.randint(low, schema.get("maximum", low + 100)) // step * step
            case {"type": "number"}:
                low = schema.get("minimum", schema.get("exclusiveMinimum"))
                return choose.choice([-1.5, 0.25, 3, 1e20, -2e-7]) if low is None else low + 0.5
            case {"type": "string", "pattern": pattern}:
                return next(one for one in _EXAMPLES if re.search(pattern, one))
            case {"type": "string", "format": kind} if kind in _OF_FORMAT:
                return _OF_FORMAT[kind]
        least, most = schema.get("minLength", 0), schema.get("maxLength", 9)
        letters = "aé日🎉 :{},[]" + ("" if "maxLength" in schema else '<|>"\\\n\t')
        return "".join(choose.choices(letters, k=choose.randint(least, most)))

    def _object(self, schema: Schema, depth: int) -> Any:
        required = schema.get("required", [])
        most = schema.get("maxProperties", 99)
        value = {name: self.of(schema["properties"][name], depth + 1) for name in required}
        for name, one in schema.get("properties", {}).items():
            is_missing = name not in value and len(value) < most
            if is_missing and (self._choices.random() < (0.7 if depth < 4 else 0)):
                value[name] = self.of(one, depth + 1)
        if not value and schema.get("minProperties"):
            name, one = next(iter(schema["properties"].items()))
            value[name] = self.of(one, depth + 1)
        return value


_EXAMPLES = ["abc", "123-4567", "red", "ABC", "a@b.com", "x, ;", "äöü", "abcd", "#00ffAA", "v1.2"]
_OF_FORMAT = {
    "date": "2026-11-30",
    "time": "12:30:00Z",
    "date-time": "2026-11-30T12:30:00Z",
    "duration": "P3D",
    "email": "a.b@c.org",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "ipv4": "10.0.0.1",
    "ipv6": "::1",
    "hostname": "a.example",
    "uri": "https://a.example/b?c=d#e",
}


@pytest.mark.parametrize("tools", rest_nightly([True, False], kept=(0,)), indirect=True, scope="module", ids=QUOTES)
def test_every_value_that_the_chat_template_writes_is_allowed(tools: Tools) -> None:
    n_values = 0
    for seed in range(150):
        schema = MadeSchema(seed).root()
        grammar, validator = tools.compiled(schema), Draft202012Validator(schema)
        value = MadeValue(schema, random.Random(seed)).of(schema)
        if not validator.is_valid(value) or 'say "hi"' in json.dumps(value, ensure_ascii=False).replace("\\", ""):
            continue  # this name is one that the template writes so that it cannot be read
        text = rendered(value)
        if re.search(r"\de[+-]\d", text):
            continue  # limits of numbers allow no exponents
        assert read(text) == value
        assert tools.accepts(grammar, text), f"{text!r} is refused by {schema}"
        n_values += 1
    assert n_values > 80


T = QUOTE
TOWN = closed(town={"type": "string"}, days={"type": "integer"})


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (TOWN, [f"{{days:3,town:{T}a{T}}}"], [f"{{town:{T}a{T},days:3}}", "{days:3}", f"{{days:3, town:{T}a{T}}}"]),
        (
            {"type": "string"},
            [f'{T}a "b" {{,\\<|"|{T}', f"{T}<{T}", f"{T}{T}"],
            ["a", '"a"', f"{T}a", f"{T}{T}{T}"],
        ),
        ({"type": "null"}, ["null", "None"], ["none"]),
        ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
        ({"type": "number"}, ["-1.5", "1e+20", "0"], ["01", "+1", f"{T}1{T}"]),
        ({"const": {"b": [1, "x"], "A": None}}, [f"{{A:null,b:[1,{T}x{T}]}}"], [f"{{b:[1,{T}x{T}],A:null}}"]),
        ({"enum": ['a"b', T]}, [f'{T}a"b{T}'], ["a"]),
        ({"type": "string", "maxLength": 2}, [f"{T}日{T}", f"{T}ab{T}", f"{T}{T}"], [f"{T}abc{T}"]),
        ({"type": "string", "minLength": 200}, [f"{T}{'a' * 200}{T}"], [f"{T}{'a' * 199}{T}"]),
        (
            {"type": "string", "format": "email"},
            [f"{T}a@b.org{T}"],
            [f"{T}a{T}", f'{T}"a"@b{T}', f'{T}\\"a\\"@b{T}'],
        ),
        (
            {"type": "object", "properties": {"ab": {"type": "integer"}, "a b": {"type": "null"}}}
            | {"additionalProperties": {"type": "boolean"}},
            ["{}", "{a b:null,ab:1,abc:true,a:true,a  b:true}", "{ac:true}", "{日-本.x:true}", "{a bc:false}"],
            ["{ab:true}", "{a b:true}", "{ab:1,ab:true}", "{a:1}", "{a :true}", "{ a:true}", f"{{{T}ab{T}:true}}"]
            + ["{:true}", "{a\tb:true}", "{a\u00a0:true}"],
        ),
        (
            closed(**{'say "hi"': {"type": "null"}, "": {"type": "null"}, " a": {"type": "null"}}),
            [f'{{{T}{T}:null,{T} a{T}:null,{T}say "hi"{T}:null}}'],
            ['{:null, a:null,say "hi":null}'],
        ),
        (
            {"type": "object", "patternProperties": {"^x-[a-z]+$": {"type": "integer"}}},
            ["{}", f"{{{T}x-a{T}:1,{T}x-b{T}:2}}"],
            [f"{{{T}x{T}:1}}"],
        ),
        (
            {"type": "object", "propertyNames": {"enum": ["a", 'b"']}, "minProperties": 1, "maxProperties": 2},
            ["{a:1}", f'{{a:{T}x{T},{T}b"{T}:[{{}}]}}'],
            ["{}", "{c:1}", "{a:1,a:1,a:1}"],
        ),
        (
            {"type": "object", "properties": {key: {"enum": [1]} for key in "abc"}}
            | {"minProperties": 2, "maxProperties": 2},
            ["{a:1,b:1}", "{a:1,c:1}", "{b:1,c:1}"],
            ["{}", "{a:1}", "{a:1,b:1,c:1}"],
        ),
        (
            {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "integer"}}
            | {"minItems": 2, "maxItems": 3},
            ["[null,1]", "[null,1,2]"],
            ["[null]", "[null,1,2,3]", "[1,2]", "[null,]"],
        ),
        (
            {
                "$defs": {"n": closed(next={"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]})},
                "$ref": "#/$defs/n",
            },
            ["{next:null}", "{next:{next:{next:None}}}"],
            ["{}", "{next:{}}"],
        ),
        ({}, [f"{{a:[1,{{b c:{T}x{T}}},null],d:true}}", "3"], ["{a:1,}", "[1,]", "x"]),
    ],
)
def test_values(tools: Tools, schema: Schema, allowed: list[str], refused: list[str]) -> None:
    grammar, validator = tools.compiled(schema), Draft202012Validator(schema)
    for text in allowed:
        assert tools.accepts(grammar, text), text
        assert validator.is_valid(read(text))
    for text in refused:
        assert not tools.accepts(grammar, text), text


def test_a_schema_that_may_be_itself(tools: Tools) -> None:
    grammar = tools.compiled({"anyOf": [{"$ref": "#"}, {"type": "null"}]})
    assert tools.accepts(grammar, "null")
    assert not tools.accepts(grammar, "{}")


def test_long_schemas(tools: Tools) -> None:
    n = 400
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n)} | {f"d{n}": {"type": "null"}}
    assert tools.accepts(tools.compiled({"$defs": chain, "$ref": "#/$defs/d0"}), "null")
    wide = {"type": "object", "properties": {f"p{i:02}": {"type": "null"} for i in range(100)}}
    grammar = tools.compiled(wide | {"additionalProperties": True})
    assert tools.accepts(grammar, "{p07:null,p99:null,p999:1,p7:2}")
    assert not tools.accepts(grammar, "{p07:null,p06:null}")
    deep: Schema = {"type": "null"}
    for _ in range(99):
        deep = closed(a=deep)
    assert tools.accepts(tools.compiled(deep), "{a:" * 99 + "null" + "}" * 99)


def test_a_text_that_has_a_quote_is_written_in_those_of_json(tools: Tools) -> None:
    schema = closed(**{T: {"const": f"a{T}é"}})
    text = r'{"<|\"|>":"a<|\"|>é"}'
    assert tools.accepts(tools.compiled(schema), text)
    assert read(text) == {T: f"a{T}é"}


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "a", "minLength": 3}, "two of format, pattern and a length"),
        ({"type": "string", "pattern": '^"$'}, "characters that JSON escapes"),
        ({"$ref": "#/$defs/n", "$defs": {"n": closed(next={"$ref": "#/$defs/n"})}}, "without end"),
        ({"type": "object", "propertyNames": {"type": "integer"}}, "propertyNames that accept values"),
        ({"type": "array", "prefixItems": [{}, {}], "maxItems": 1}, "number of items"),
        ({"type": "object", "required": ["a", "b"], "maxProperties": 1}, "number of properties"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "cannot be enforced"),
    ],
)
def test_refused_schemas(tools: Tools, schema: Schema, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        tools.compiled(schema)


def test_a_text_may_be_any_tokens_up_to_the_quote(tools: Tools) -> None:
    grammar = tools.compiled({"type": "string"})
    quote = tools.quote
    matcher = grammar.new_matcher()
    assert matcher.accept(quote)
    for token_id, token in enumerate(tools.vocabulary.tokens):
        is_text = bool(token) and token_id != quote and token_id not in tools.vocabulary.eos_token_ids
        if is_text and _is_utf8(token):
            assert matcher.accept(token_id), token
    assert matcher.accept(quote)
    assert matcher.is_complete


@pytest.mark.parametrize("text", [b"\xf0\x80\x80\x80", b"\xe0\x80\xbc", b"\xed\xa0\x80", b"\xc0\xbc", b"\xff"])
def test_a_text_is_utf_8(tools: Tools, text: bytes) -> None:
    matcher = tools.compiled({"type": "string"}).new_matcher()
    assert matcher.accept(tools.quote)
    assert not all(matcher.accept(tools.vocabulary.tokens.index(bytes([one]))) for one in text)


def _is_utf8(token: bytes) -> bool:
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True
