"""Tests of chat templates against Transformers, and of what they reject."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, processors

from radixkv.errors import CheckpointError, ContextLengthExceeded, InvalidRequest
from radixkv.text import chat_template
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.template_budget import MAX_OPERATIONS, BudgetExceeded, OperationBudget
from radixkv.text.template_sandbox import BUDGET
from radixkv.text.tokenizer import Tokenizer
from support.cases import rest_nightly
from support.chat_templates import CHATML, LLAMA_3, MISTRAL, QWEN_3, TEMPLATES

USER = {"role": "user", "content": " Is 2 < 3 & 'é'? <b>日本</b>\n"}
ASSISTANT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes.  "}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2.5, None], "é": "<"}}}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [{"role": "system", "content": " Be brief. "}, USER],
    "several turns": [USER, ASSISTANT, USER, ASSISTANT, USER],
    "ends with the assistant": [USER, ASSISTANT],
    "tools": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}],
    "out of order": [USER, USER],
    "developer": [{"role": "developer", "content": "x"}, {**USER, "name": "Ann"}],
}


def write_checkpoint(folder: Path, template: Any, **config: Any) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, "a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def load(folder: Path, override: Path | None = None) -> ChatTemplate:
    template = ChatTemplate.load(folder, override)
    assert template is not None
    return template


def transformers_text(folder: Path, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """Renders with Transformers; returns None if the template raises an error."""
    from jinja2 import TemplateError
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast.from_pretrained(str(folder))
    try:
        return oracle.apply_chat_template(messages, tokenize=False, **options)
    except TemplateError:
        return None


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_the_text_equals_that_of_transformers(tmp_path: Path, source: str, messages: list[dict[str, Any]]) -> None:
    write_checkpoint(tmp_path, source)
    template = load(tmp_path)
    for options in ({"add_generation_prompt": True}, {"add_generation_prompt": False, "enable_thinking": False}):
        expected = transformers_text(tmp_path, messages, **options)
        if expected is None:
            with pytest.raises(InvalidRequest, match="refuses the messages: ") as caught:
                template.render(messages, **options)
            assert caught.value.param == "messages"
        else:
            assert template.render(messages, **options) == expected


@pytest.mark.parametrize("content", ["Once upon", "Once upon  ", "\n a"])
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_the_last_message_is_continued_as_in_transformers(tmp_path: Path, source: str, content: str) -> None:
    write_checkpoint(tmp_path, source)
    messages = [USER, {"role": "assistant", "content": content}]
    expected = transformers_text(tmp_path, messages, continue_final_message=True)
    template = load(tmp_path)
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == expected
    assert text.rstrip().endswith(content.strip())


def test_variables_reach_the_template(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, QWEN_3)
    template = load(tmp_path)
    assert template.render([USER], enable_thinking=False).endswith("</think>\n\n")
    assert not template.render([USER]).endswith("</think>\n\n")
    write_checkpoint(tmp_path, LLAMA_3)
    assert "Today Date: 26 Jul" in load(tmp_path).render([USER], date_string="26 Jul", messages="not these")
    assert load(tmp_path).render([USER], bos_token="<other>").startswith("<other>")


def test_special_tokens_are_texts_or_objects(tmp_path: Path) -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ image_token }}{{ pad_token }}"
    added = {"content": "</s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    write_checkpoint(tmp_path, source, eos_token={"__type": "AddedToken", **added}, image_token="<img>")
    assert (
        load(tmp_path).render([USER]) == "<s></s><img>" == transformers_text(tmp_path, [USER]).replace("None", "")
    )


@pytest.mark.parametrize("has_decoder", [False, True])
def test_older_checkpoints_have_special_tokens_in_a_file_of_their_own(tmp_path: Path, has_decoder: bool) -> None:
    config = {"added_tokens_decoder": {}} if has_decoder else {}
    write_checkpoint(tmp_path, "{{ bos_token }}{{ eos_token }}", **config)
    special = {"eos_token": {"content": "<end>", "lstrip": False, "rstrip": False, "normalized": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    assert load(tmp_path).render([USER]) == transformers_text(tmp_path, [USER])


def test_the_default_of_several_templates_is_used(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ messages[0].role }}"}]
    write_checkpoint(tmp_path, named)
    assert load(tmp_path).render([USER]) == "user" == transformers_text(tmp_path, [USER])


NAMED = {
    "default": "{{ messages[0].content }} alone",
    "tool_use": "{{ messages[0].content }} with {{ tools[0].function.name }}",
    "rag": "rag",
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(
    "place", ["the configuration", "an object of it", "files", "files beside the configuration"]
)
def test_named_templates_are_chosen_as_by_transformers(tmp_path: Path, place: str) -> None:
    named = [{"name": name, "template": source} for name, source in NAMED.items()]
    write_checkpoint(tmp_path, {"files": None, "an object of it": NAMED}.get(place, named))
    if place.startswith("files"):
        (tmp_path / "chat_template.jinja").write_text(NAMED["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(NAMED[name])
    for tools in (None, TOOLS):
        for options in ({}, {"continue_final_message": True}):
            messages = [USER] if not options else [{"role": "assistant", "content": "A"}]
            text = load(tmp_path).render(messages, tools=tools, add_generation_prompt=not options, **options)
            assert text == transformers_text(tmp_path, messages, tools=tools, **options)
    assert load(tmp_path).render([USER], tools=[]) == transformers_text(tmp_path, [USER])
    for name in NAMED:
        expected = transformers_text(tmp_path, [USER], tools=TOOLS, chat_template=name)
        assert load(tmp_path, Path(name)).render([USER], tools=TOOLS) == expected
    with pytest.raises(CheckpointError, match="default, rag, tool_use"):
        load(tmp_path, Path("agent"))


def test_a_single_file_replaces_all_of_the_configuration(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [{"name": name, "template": source} for name, source in NAMED.items()])
    (tmp_path / "chat_template.jinja").write_text("one for all")
    assert load(tmp_path).render([USER], tools=TOOLS) == "one for all"
    assert transformers_text(tmp_path, [USER], tools=TOOLS) == "one for all"


def test_a_file_beside_a_template_in_the_configuration(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, NAMED["default"])
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(NAMED["tool_use"])
    template = load(tmp_path)
    assert template.render([USER]).endswith("alone")
    assert template.render([USER], tools=TOOLS).endswith("with add")


def test_the_users_file_goes_before_what_is_malformed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [])
    (tmp_path / "mine").write_text("mine")
    assert load(tmp_path, tmp_path / "mine").render([USER]) == "mine"


def test_a_file_goes_before_the_configuration_and_the_users_before_both(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "from config")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert load(tmp_path).render([USER]) == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert load(tmp_path).render([USER]) == "from jinja" == transformers_text(tmp_path, [USER])
    (tmp_path / "mine").write_text("{{ bos_token }}mine")
    assert load(tmp_path, tmp_path / "mine").render([USER]) == "<s>mine"


def test_a_checkpoint_without_template(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    write_checkpoint(tmp_path, None)
    assert ChatTemplate.load(tmp_path) is None


def test_the_templates_bos_is_the_only_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, MISTRAL)
    text = load(tmp_path).render([{"role": "user", "content": "a"}])
    assert text.startswith("<s>")
    tokenizer = Tokenizer.load(tmp_path)
    bos = (0).to_bytes(4, "little")
    assert tokenizer.encode(text, adds_special_tokens=False).count(bos) == 1
    assert tokenizer.encode(text).startswith(bos + bos)


@pytest.mark.parametrize("source", ["{% for %}", "{{ 1 +", "{% endfor %}", "{{ a | no_such_filter }}"])
def test_an_invalid_template_is_rejected_when_it_is_loaded(tmp_path: Path, source: str) -> None:
    write_checkpoint(tmp_path, source)
    with pytest.raises(
        CheckpointError, match="tokenizer_config.json: chat_template is not a chat template: "
    ) as caught:
        ChatTemplate.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "found", [3, {}, [], ["x"], {"default": 3}, [{"name": "rag", "template": "x"}], [{"name": "default"}]]
)
def test_a_template_of_the_wrong_json_type_is_rejected(tmp_path: Path, found: Any) -> None:
    write_checkpoint(tmp_path, found)
    with pytest.raises(CheckpointError, match="tokenizer_config.json: chat_template"):
        ChatTemplate.load(tmp_path)


def test_unreadable_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere cannot be read"):
        ChatTemplate.load(tmp_path, tmp_path / "nowhere")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer_config.json is not JSON"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ messages[0].no_such_thing.at_all }}",
        "{{ 1 // 0 }}",
        "{% include 'file' %}",
        "{% set ns = namespace(__class__=1) %}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_is_sandboxed_and_its_errors_are_request_errors(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, {}, "here").render([USER])
    assert caught.value.param == "messages"
    assert "日本" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) if i < 0 %}{% endfor %}" * 50,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for m in [[[]]] recursive %}{{ loop([m, m]) }}{% endfor %}",
        "{% macro f() %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        "{% endmacro %}{% set x = f() %}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(source: str) -> None:
    with pytest.raises(InvalidRequest, match="the chat template") as found:
        ChatTemplate(source, {}, "here").render([USER], OperationBudget(100_000, 3600.0), **{BUDGET: None})
    assert found.value.param == "messages"


LONG = "{% set long = 'a' * 1000000 %}"
DOUBLING = "{% set ns = namespace(x=start) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    rest_nightly(
        [
            "{{ ('a' * 10**8)|length }}",
            "{{ (10**8 * 'a' + 'b')|length }}",
            "{{ ([0] * 10**8)|length }}",
            "{{ 9 ** (10 ** 8) > 0 }}",
            "{{ 'a'.center(10**8)|length }}",
            "{{ 'a'|center(10**8)|length }}",
            "{{ ['a', 'b']|map('center', 10**8)|list|length }}",
            "{{ 'a'.ljust(10**8)|length }}",
            "{{ 'a'.zfill(10**8)|length }}",
            "{{ '\t'.expandtabs(10**8)|length }}",
            "{{ '%99999999d'|format(1)|length }}",
            "{{ ('%0*d' % (10**8, 1))|length }}",
            "{{ '{:100000000}'.format(1)|length }}",
            "{{ '{x:{n}}'.format_map({'x': 1, 'n': 10**8})|length }}",
            "{{ '{:{}}'.format(1, 10**8)|length }}",
            "{{ '{0.n:{0.n}}'.format(namespace(n=10**8))|length }}",
            "{{ ('%*d'|format(10**8, 1))|length }}",
            "{{ ['%*d']|map('format', 10**8, 1)|first|length }}",
            "{{ ('%100000000d'.encode() % 1)|length }}",
            "{{ (('%(a)s' * 1000) % {'a': 'b' * 100000})|length }}",
            "{{ ('a\n' * 1000)|indent(100000)|length }}",
            "{{ messages|tojson(indent=10**8)|length }}",
            "{{ [1]|batch(10**8, 0)|list|length }}",
            "{{ [1]|slice(10**8)|list|length }}",
            "{{ 1|round(-10**9) }}",
            LONG + "{{ long|replace('a', long)|length }}",
            LONG + "{{ long.replace('a', long)|length }}",
            LONG + "{{ long|join(long)|length }}",
            "{{ ''.join(['a' * 1000000] * 1000000)|length }}",
            "{{ (['a' * 1000000] * 1000000)|map('upper')|join|length }}",
            "{{ ([[1] * 1000] * 1000 * 1000)|tojson|length }}",
            LONG + "{{ (long * 2).encode('punycode')|length }}",
            LONG + "{{ strftime_now(long * 9)|length }}",
            "{% set x = 'a' * 1000 %}" + "{% set x = x + x %}" * 60,
            "{% set x = 'a' * 1000 %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
            "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set x = " + "f(" * 60 + "'a' * 1000" + ")" * 60 + " %}",
            *(
                DOUBLING.replace("STEP", step)
                for step in (
                    "ns.x + ns.x",
                    "ns.x ~ ns.x",
                    "[ns.x, ns.x]",
                    "{1: ns.x, 2: ns.x}",
                    "(ns.x, ns.x)|list",
                )
            ),
            "{% macro pair() %}{% set ns.x = varargs %}{% endmacro %}"
            + DOUBLING.replace("{% set ns.x = STEP %}", "{{ pair(ns.x, ns.x) }}"),
            "{% macro pair() %}{% set ns.x = kwargs %}{% endmacro %}"
            + DOUBLING.replace("{% set ns.x = STEP %}", "{{ pair(a=ns.x, b=ns.x) }}"),
            "{% set ns = namespace(x='aaaaaaaa') %}{% block twice %}{{ ns.x }}{{ ns.x }}{% endblock %}"
            "{% for i in range(22) %}{% set ns.x = self.twice() %}{% endfor %}",
            DOUBLING.replace("STEP", "(ns.x * 2)|batch(2)|list").replace("start", "[1]"),
            DOUBLING.replace("STEP", "ns.x * ns.x").replace("start", "3"),
        ],
        kept=(
            0,
            1,
            2,
            3,
            4,
            5,
            6,
            7,
            8,
            9,
            10,
            11,
            12,
            13,
            14,
            15,
            16,
            17,
            18,
            19,
            20,
            21,
            22,
            23,
            24,
            25,
            26,
            27,
            28,
            29,
            30,
            31,
            32,
            33,
            34,
            35,
            36,
            37,
            38,
            41,
            43,
            44,
        ),
    ),
)
def test_a_value_that_would_be_too_long_is_not_made(source: str) -> None:
    with pytest.raises(InvalidRequest) as found:
        ChatTemplate(source, {}, "here").render([USER], OperationBudget(1 << 20, 3600.0), start="aaaaaaaa")
    assert "MemoryError" not in str(found.value)


HUGE = "{% set huge = ('f' * 10000000)|int(0, 16) %}{% set half = ('f' * 5000000)|int(0, 16) %}"


@pytest.mark.parametrize(
    "source",
    rest_nightly(
        [
            "{{ ('a' * 1000000)|wordwrap(1)|length }}",
            "{{ ['a' * 1000000]|map('wordwrap', width=1)|first|length }}",
            "{{ (')' * 300000 ~ 'x)')|urlize|length }}",
            "{{ ('<!--' * 100000 ~ '-->' * 100000)|striptags|length }}",
            "{{ ('a' * 1000000)|trim('b' * 1000000 ~ 'a')|length }}",
            "{{ ('a' * 1000000)|trim(chars='b' * 1000000 ~ 'a')|length }}",
            *(
                "{{ ('a' * 1000000).METHOD('b' * 1000000 ~ 'a')|length }}".replace("METHOD", method)
                for method in ("strip", "lstrip", "rstrip")
            ),
            *(
                "{{ ('a' * 1000000).METHOD('ab' ~ 'a' * 100000) }}".replace("METHOD", method)
                for method in ("rfind", "rsplit", "rpartition", "rindex")
            ),
            "{{ 1|round(100000000, 'floor') }}",
            "{{ 5|round(-100000000) }}",
            HUGE + "{{ huge // half > 0 }}",
            HUGE + "{{ huge % half > 0 }}",
            HUGE + "{{ huge is divisibleby(half) }}",
            HUGE + "{{ [huge]|select('divisibleby', half)|list|length }}",
            "{% set ns = namespace() %}{% set ns.a = ns %}"
            "{{ ([ns] * 100000)|map(attribute='a.' * 500000 ~ 'a')|list|length }}",
            "{% set ns = namespace(x=[1] * 10000) %}{% for i in range(900) %}{% set ns.x = [ns.x] %}{% endfor %}"
            "{{ ns.x|tojson(indent=100)|length }}",
            "{{ ('a' * 500000 ~ '-' ~ 'a' * 500000).encode('ascii').decode('punycode')|length }}",
            "{{ ('ab,' * 6000000).split(',')|length }}",
            "{% set x = 'a' * 10000000 %}" + "".join(f"{{% set a{i} = x.upper() %}}" for i in range(200)),
            "{% set x = 'a' * 10000000 %}" + "".join(f"{{% set a{i} = x|upper %}}" for i in range(200)),
            "{% set x = 'a' * 10000000 %}" + "".join(f"{{% set a{i} = x[1:] %}}" for i in range(200)),
        ],
        kept=(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 21, 22, 23, 24, 25),
    ),
)
def test_what_takes_longer_than_its_arguments_are_long_is_not_begun(source: str) -> None:
    """Each of these would take seconds to days, or gigabytes."""
    with pytest.raises(InvalidRequest, match="more than 4194304 operations|rounds to more than"):
        ChatTemplate(source, {}, "here").render([USER], OperationBudget(MAX_OPERATIONS, 3600.0))


@pytest.mark.parametrize(
    "statement",
    rest_nightly(
        [
            "{% set z = x == y %}",
            "{% if x == y %}{% else %}{% endif %}",
            "{% if x == y %}{% endif %}{% if false %}" + "{{ 1 }}" * 20 + "{% endif %}",
            "{% for i in [] %}" + "{% set z = 1 %}" * 20 + "{% else %}{% if x == y %}{% endif %}{% endfor %}",
            "{% if false %}{% elif x == y %}{% endif %}",
        ],
        kept=(0, 1, 2, 4),
    ),
)
def test_statements_without_loops_are_counted_too(statement: str) -> None:
    source = "{% set x = 'a' * 100 %}{% set y = 'a' * 99 ~ 'b' %}" + statement * 200
    template = ChatTemplate(source, {}, "here")
    template.render([USER])
    with pytest.raises(BudgetExceeded):
        template.render([USER], OperationBudget(10, 3600.0))


def test_a_statement_with_too_many_comparisons_is_no_template() -> None:
    assert ChatTemplate("{{ [" + "1 == 2," * 900 + "] }}", {}, "here").render([USER])
    with pytest.raises(CheckpointError, match="1000 comparisons"):
        ChatTemplate("{{ [" + "1 == 2," * 1100 + "] }}", {}, "here")


def test_namespaces_within_namespaces_are_a_short_text() -> None:
    source = DOUBLING.replace("STEP", "namespace(a=ns.x, b=ns.x)") + "{{ ns.x }}"
    assert len(ChatTemplate(source, {}, "here").render([USER])) < 1000


@pytest.mark.parametrize(
    "step", rest_nightly(["long|upper", "long[1:]", "long|sort|join", "'b' in long"], kept=(0, 1, 3))
)
def test_a_template_that_takes_too_long_is_stopped(step: str) -> None:
    """Each operation is short, and there are few enough of them."""
    source = LONG + "{% for i in range(99999) %}{% set x = STEP %}{% endfor %}".replace("STEP", step)
    with pytest.raises(BudgetExceeded, match="or 0.1 s"):
        ChatTemplate(source, {}, "here").render([USER], OperationBudget(MAX_OPERATIONS, 0.1))


def test_a_long_message_and_ordinary_work_are_within_the_budget() -> None:
    source = (
        "{% for key, value in messages[0]|dictsort %}{{ '%s: ' % key }}{{ loop.index % 2 }}{% endfor %}"
        "{% for m in messages %}{{ m.content|trim|replace('<b>', '') + ('a' ~ 2 ** 3) }}"
        "{{ m.content.replace('a', 'b')|indent(2) }}{{ ['x', m.content]|join('-') }}{{ m|tojson(indent=1) }}"
        "{{ '%s %5.1f'|format(m.content, 2) }}{{ 'id {}'.format(1700000000) }}{% endfor %}"
    )
    message = {"role": "user", "content": "abc " * 50_000, "time": 1_700_000_000, "id": 10**17}
    assert len(ChatTemplate(source, {}, "here").render([message] * 10)) > 10 * 5 * 200_000


def test_loop_variables_work_in_counted_loops() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.revindex0 }};"
        "{% else %}none{% endfor %}{% for m in nothing %}{% else %}-{% endfor %}"
        "{% for m in messages recursive %}{{ loop.depth }}{{ loop(m.more) if m.more else '' }}{% endfor %}"
    )
    text = ChatTemplate(source, {}, "here").render([USER, {"more": [USER]}])
    assert text == "1/2False1;2/2True0;-112"


def test_a_rendered_text_that_is_too_long_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARACTERS", 1000)
    endless = "{% for i in range(1000) %}{% for i in range(1000) %}xx{% endfor %}{% endfor %}"
    with pytest.raises(ContextLengthExceeded, match="more than 1000 characters"):
        ChatTemplate(endless, {}, "here").render([USER])
    assert len(ChatTemplate("{{ 'x' * 1000 }}", {}, "here").render([USER])) == 1000


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "last message with text"),
        ([{"role": "assistant", "content": None}], "last message with text"),
        ([{"role": "system", "content": "dropped"}], "changes the last message"),
    ],
)
def test_messages_that_cannot_be_continued_are_rejected(messages: list[dict[str, Any]], match: str) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}", {}, "here")
    with pytest.raises(InvalidRequest, match=match):
        template.render(messages, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="set add_generation_prompt to false"):
        ChatTemplate(CHATML, {}, "here").render([ASSISTANT], continue_final_message=True)
