"""A role that nobody knows is refused by its name, whatever the API; one that the chat template names is served."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.text.chat_template import ChatTemplate
from support.running_site import site_fixture
from support.scripted_runtime import Site

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'ipython' or m['role'] == \"critic\" %}[{{ m.content }}]"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


site = site_fixture(chat_template=ChatTemplate(TEMPLATE, {}, "the test"))


APIS: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/chat/completions", "messages", {"max_tokens": 2}),
    ("/v1/responses", "input", {"max_output_tokens": 2}),
    ("/v1/messages", "messages", {"max_tokens": 2}),
    ("/v1/messages/count_tokens", "messages", {}),
    ("/tokenize", "messages", {}),
    ("/cache/explain", "messages", {}),
    ("/cache/match", "messages", {}),
]
STREAMING = {path for path, _, _ in APIS[:3]}


@pytest.mark.parametrize("role", ["usr", "User", "human", "model", "ip", ["user"], {}, 5, None], ids=str)
@pytest.mark.parametrize(("path", "field", "body"), APIS, ids=lambda value: str(value)[:30])
def test_an_unknown_role_is_refused_by_name(
    site: Site, path: str, field: str, body: dict[str, Any], role: object
) -> None:
    conversation = [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]
    for stream in ({}, {"stream": True}) if path in STREAMING else ({},):
        reply = site.http.post(path, json={field: conversation, **body, **stream})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, field), reply.text
        assert f"{field}[1].role" in error["message"]
        assert not isinstance(role, str) or f"{field}[1].role is '{role}'" in error["message"]


@pytest.mark.parametrize(
    "role", ["system", "developer", "user", "assistant", "tool", "function", "ipython", "critic"]
)
def test_roles_of_openai_and_of_the_template_are_served(site: Site, role: str) -> None:
    messages = [{"role": role, "content": "b"}]
    reply = site.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
    assert reply.status_code == 200, reply.text


def test_a_long_role_is_shortened(site: Site) -> None:
    messages = [{"role": "x" * 5000, "content": "b"}]
    error = site.http.post("/v1/chat/completions", json={"messages": messages}).json()["error"]
    assert len(error["message"]) < 300
