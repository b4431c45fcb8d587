from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from radixkv.frontend.served_model import ServedModel
from radixkv.generation.parsers.answer_format import AnswerFormat
from radixkv.text.chat_template import ChatTemplate
from support.running_site import running_site
from support.scripted_runtime import Site

AGENT_TEMPLATE = ChatTemplate(
    "{{ messages[-1].content }}<eos>"
    "{% for message in messages[:-1] %}<{{ message.role }}>{{ message.content }}"
    "{% if message.reasoning_content %}[{{ message.reasoning_content }}]{% endif %}"
    "{% if 'tool_calls' in message %}{{ message.tool_calls | tojson }}{% endif %}{% endfor %}"
    "{{ tools | tojson if tools }}{# <tool_call> </think> #}",
    {},
    "the test",
)
"""The answer is the content of the last message, because the runtime echoes the prompt up to an end token."""


@pytest.fixture(scope="module")
def agent_site(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site whose model calls tools and reasons as the last message says."""
    answer_format = AnswerFormat.load(tmp_path_factory.mktemp("model"), AGENT_TEMPLATE)
    ready = msgspec.structs.replace(served_model.ready, max_model_len=4096, n_pages=256)
    model = replace(served_model, ready=ready, chat_template=AGENT_TEMPLATE, answer_format=answer_format)
    with running_site(model, tmp_path_factory.mktemp("s")) as site:
        yield site
