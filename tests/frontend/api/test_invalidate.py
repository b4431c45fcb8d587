"""``/cache/invalidate``: which prefix it names, and what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from radixkv.frontend.api import lifetimes
from radixkv.frontend.served_model import ServedModel
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.adapter_messages import ServedAdapter
from radixkv.wire.cache_messages import Invalidate
from radixkv.wire.messages import pack_tokens
from radixkv.wire.namespace import CacheNamespace
from support.running_site import running_site, site_fixture
from support.scripted_runtime import DISK, HOST, Site

MESSAGES = [{"role": "user", "content": "hi there, you all"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"


site = site_fixture(chat_template=ChatTemplate(TEMPLATE, {}, "test"))


def invalidate(site: Site, **body: Any) -> tuple[Invalidate, dict[str, Any]]:
    """Returns the message that the runtime gets, and the reply."""
    reply = site.http.post("/cache/invalidate", json=body)
    assert reply.status_code == 200, reply.text
    return site.loop.invalidated[-1], reply.json()


def test_a_prompt_or_messages_name_the_prefix(site: Site, tokenizer: Tokenizer) -> None:
    text = "a text that is longer than a page"
    message, reply = invalidate(site, prompt=text)
    assert (message.tokens, message.namespace.cache_salt) == (tokenizer.encode(text), "")
    assert reply == {"pages_dropped": {"device": 3}, "pages_held": 1}
    message, _ = invalidate(site, prompt=list(range(16)), cache_salt="hers")
    assert (len(message.tokens), message.namespace.cache_salt) == (64, "hers")
    message, _ = invalidate(site, messages=MESSAGES)
    assert tokenizer.decode(list(message.tokens[::4])) == MESSAGES[0]["content"], "no header of an answer"
    message, _ = invalidate(site, messages=MESSAGES, add_generation_prompt=True)
    assert tokenizer.decode(list(message.tokens[::4])) == MESSAGES[0]["content"] + "!"


def test_a_salt_alone_names_all_that_it_has(site: Site) -> None:
    for salt in ("hers", ""):
        message, _ = invalidate(site, cache_salt=salt, prompt=None)
        assert (message.tokens, message.namespace.cache_salt) == (b"", salt)


def test_the_reply_has_the_pages_of_each_tier(site: Site) -> None:
    site.loop.host = HOST
    assert invalidate(site, cache_salt="")[1]["pages_dropped"] == {"device": 3, "host": 2}
    site.loop.disk = DISK
    assert invalidate(site, cache_salt="")[1]["pages_dropped"] == {"device": 3, "host": 2, "storage": 4}


def test_another_model_is_not_found(site: Site) -> None:
    for body in ({"cache_salt": ""}, {"prompt": [1] * 16}):
        assert site.http.post("/cache/invalidate", json={**body, "model": "other"}).status_code == 404


def test_without_a_model_all_adapters_are_meant(site: Site) -> None:
    served = site.http.get("/v1/models").json()["data"][0]["id"]
    for body in ({"cache_salt": ""}, {"prompt": [1] * 16}, {"messages": MESSAGES}):
        for fields, is_meant in (({}, True), ({"model": served}, False)):
            message, _ = invalidate(site, **body, **fields)
            assert (message.namespace.adapter, message.all_adapters) == ("", is_meant)


@pytest.mark.parametrize("changes", [ServedModel.add_adapter, lambda served, law: served.remove_adapter("sql")])
def test_adapters_may_come_and_go_meanwhile(
    served_model: ServedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: Callable[[ServedModel, ServedAdapter], None],
) -> None:
    """The prefixes of the adapters that it began with are dropped, in their own namespaces."""
    sql, law = (ServedAdapter(name, f"/{name}", name[0] * 64) for name in ("sql", "law"))
    served = replace(served_model, ready=msgspec.structs.replace(served_model.ready, adapters=(sql, law)))
    late = ServedAdapter("late", "/late", "d" * 64)
    encoded: list[str] = []

    async def encode(body: Any, model: ServedModel, tenant: str) -> bytes:
        await asyncio.sleep(0)
        if len(encoded) == 1:  # after the model alone, before the first adapter
            changes(served, late)
        encoded.append(model.adapter)
        return pack_tokens([*range(20), len(encoded)])

    monkeypatch.setattr(lifetimes, "encode_prompt", encode)
    with running_site(served, tmp_path) as site:
        reply = site.http.post("/cache/invalidate", json={"messages": MESSAGES, "cache_salt": "hers"})
        assert reply.status_code == 200, reply.text
        means = [(one.namespace, one.all_adapters) for one in site.loop.invalidated]
    assert encoded == ["", sql.digest, law.digest]
    assert means == [
        (CacheNamespace("", "hers"), True),
        *((CacheNamespace("", "hers", digest), False) for digest in encoded[1:]),
    ]
