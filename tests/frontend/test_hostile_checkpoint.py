"""A checkpoint whose tokenizer wants to stop the server, on every API."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import tokenizers

from radixkv.frontend.served_model import ServedModel
from radixkv.text.tokenizer import Tokenizer
from support.cases import covering
from support.hostile_tokenizers import HOSTILE, give_up_soon
from support.running_site import running_site
from support.scripted_runtime import Site
from support.site_requests import asks

SLOW = "a" * 60_000
MESSAGES = [{"role": "user", "content": SLOW}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    *asks(SLOW).items(),
    ("/v1/completions", {"prompt": ["b", SLOW], "stream": True}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES, "model": "echo"}),
    ("/tokenize", {"prompt": SLOW}),
    ("/cache/explain", {"prompt": SLOW}),
    ("/cache/match", {"prompt": [SLOW]}),
    ("/cache/pin", {"messages": MESSAGES}),
]


@pytest.fixture(scope="module")
def make_site(
    served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[tokenizers.Tokenizer], Any]]:
    def make(backend: tokenizers.Tokenizer) -> Any:
        model = replace(served_model, tokenizer=Tokenizer(backend), max_token_characters=None)
        return running_site(model, tmp_path_factory.mktemp("s"))

    patch = pytest.MonkeyPatch()
    give_up_soon(patch)
    yield make
    patch.undo()


@pytest.fixture(scope="module")
def hostile_site(
    request: pytest.FixtureRequest, make_site: Callable[[tokenizers.Tokenizer], Any]
) -> Iterator[Site]:
    with make_site(HOSTILE[request.param]()) as site:
        yield site


@pytest.mark.parametrize(
    ("hostile_site", "request_"),
    covering(["a pattern that takes quadratic time", "a normalizer that makes a long text"], REQUESTS),
    indirect=["hostile_site"],
    scope="module",
)
def test_a_text_that_cannot_be_encoded_is_a_400_and_the_server_goes_on(
    hostile_site: Site, request_: tuple[str, dict[str, Any]]
) -> None:
    path, body = request_
    replies: list[Any] = []
    asking = threading.Thread(target=lambda: replies.append(hostile_site.http.post(path, json=body)))
    asking.start()
    n_healthy = 0
    while asking.is_alive():
        assert hostile_site.http.get("/health").status_code == 200
        n_healthy += 1
        asking.join(0.01)
    assert n_healthy > 3, "the event loop serves others meanwhile"
    assert replies[0].status_code == 400
    assert "the tokenizer of this checkpoint cannot encode the text" in replies[0].json()["error"]["message"]
    reply = hostile_site.http.post("/v1/completions", json={"prompt": "b", "max_tokens": 2})
    assert reply.status_code == 200, reply.text
