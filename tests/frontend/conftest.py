from __future__ import annotations

from collections.abc import Iterator

import pytest

from radixkv.frontend.served_model import ServedModel
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from support.running_site import site_fixture
from support.scripted_runtime import EOS, ScriptedLoop, Site, write_tokenizer

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'nobody' %}{{ raise_exception('there is no role nobody') }}{% endif -%}
<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor -%}
{%- endfor -%}
{{ mood }}{{ reasoning_effort }}{{ '(on)' if enable_thinking }}
{%- if add_generation_prompt %}<assistant>{% endif %}"""

SITES = {"site", "agent_site"}
"""Fixtures that several tests share."""


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def served_model(tokenizer: Tokenizer) -> ServedModel:
    template = ChatTemplate(CHAT_TEMPLATE, {"bos_token": "<eos>"}, "the test")
    return ServedModel(
        name="echo",
        root="some/echo",
        ready=ScriptedLoop().ready,
        tokenizer=tokenizer,
        eos_token_ids=frozenset({EOS}),
        created=1_700_000_000,
        max_token_characters=5,
        chat_template=template,
    )


site = site_fixture()


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Waits until a test's requests have ended, once its sites have the script again that they had before it."""
    sites: list[Site] = [request.getfixturevalue(name) for name in SITES & {*request.fixturenames}]
    before = [vars(site.loop).copy() for site in sites]
    yield
    for site, script in zip(sites, before, strict=True):
        vars(site.loop).update(script)
        site.call(site.client.idle())
