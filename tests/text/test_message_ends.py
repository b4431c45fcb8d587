"""Special tokens with which chat templates end messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from radixkv.text.message_ends import message_end_ids
from support.chat_templates import GPT_OSS, TEMPLATES
from support.small_tokenizers import byte_letters

NO_ENDS = """\
{%- for message in messages -%}
    {{- '<SPECIAL_' ~ {'system': 10, 'user': 11, 'assistant': 12}[message.role] ~ '>' ~ message.content ~ '\\n' -}}
{%- endfor -%}"""
WITHOUT_SYSTEM = """\
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{{- raise_exception('no system messages') -}}{%- endif -%}
    {{- message.content + ('<|im_end|>' if message.role == 'user' else '</s>') -}}
{%- endfor -%}"""
SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "<|turn>", "<turn|>", "<|start|>", "<|message|>", "<|channel|>"),
    *("<|end|>", "<|endoftext|>", "<SPECIAL_1>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
]
ENDS = {
    "chatml": {"<|im_end|>"},
    "llama 3": {"<|eot_id|>"},
    "mistral": {"[/INST]", "</s>"},
    "qwen 3": {"<|im_end|>"},
    "qwen 3.5": {"<|im_end|>"},
    "gemma 4": {"<turn|>"},
    "gpt-oss": {"<|end|>"},
    "no ends": {"<SPECIAL_11>", "<SPECIAL_12>"},
    "without system": {"<|im_end|>", "</s>"},
}


def save(folder: Path, template: str | None) -> None:
    byte_letters(special=SPECIAL).save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "template"),
    [*TEMPLATES.items(), ("gpt-oss", GPT_OSS), ("no ends", NO_ENDS), ("without system", WITHOUT_SYSTEM)],
)
def test_ends_are_the_special_tokens_behind_contents(name: str, template: str, tmp_path: Path) -> None:
    save(tmp_path, template)
    ids = {token: 256 + index for index, token in enumerate(SPECIAL)}
    assert message_end_ids(tmp_path) == {ids[token] for token in ENDS[name]}


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ raise_exception('never') }}",
        "{{ messages",
        "no contents",
        "{% for message in messages %}{{ message.content | upper }}</s>{% endfor %}",
        "{% for message in messages | reverse %}{{ message.content }}</s>{% endfor %}",
        "{% for message in messages %}{{ message.content }}</not-special>{% endfor %}",
    ],
)
def test_no_ends_are_found_in_other_templates(template: str | None, tmp_path: Path) -> None:
    save(tmp_path, template)
    assert message_end_ids(tmp_path) == frozenset()


def test_a_tokenizer_that_is_missing_or_corrupt_has_none(tmp_path: Path) -> None:
    save(tmp_path, TEMPLATES["chatml"])
    (tmp_path / "tokenizer.json").write_text("{")
    assert message_end_ids(tmp_path) == frozenset()
    (tmp_path / "tokenizer.json").unlink()
    assert message_end_ids(tmp_path) == frozenset()
