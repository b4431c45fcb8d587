"""``/cache/invalidate``: which prefix it names, and what it answers."""

from __future__ import annotations

from typing import Any

from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.cache_messages import Invalidate
from support.running_site import site_fixture
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
