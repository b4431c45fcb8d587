"""Known nonces in system messages: they are no part of the prompt, unless the server keeps them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from radixkv.frontend.served_model import ServedModel
from radixkv.generation.nonces import NonceFilter
from support.running_site import running_site
from support.scripted_runtime import Site

HEADER = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch="
RULES, USER = "You are Claude Code.", {"role": "user", "content": "Hi"}


def tokens(site: Site, system: str) -> list[int]:
    reply = site.http.post("/tokenize", json={"messages": [{"role": "system", "content": system}, USER]})
    assert reply.status_code == 200, reply.text
    ids: list[int] = reply.json()["tokens"]
    return ids


def test_prompts_with_other_nonces_are_equal_and_the_doctor_counts_them(
    served_model: ServedModel, tmp_path: Path
) -> None:
    with running_site(replace(served_model, nonce_filter=NonceFilter()), tmp_path) as site:
        for nonce in ("36ee5", "0aaa9"):
            assert tokens(site, f"{HEADER}{nonce};\n{RULES}") == tokens(site, RULES)
        body = {"messages": [{"role": "system", "content": f"{HEADER}1;\n{RULES}"}, USER], "max_tokens": 1}
        usage = site.http.post("/v1/chat/completions", json=body).json()["usage"]
        assert usage["prompt_tokens"] == len(tokens(site, RULES))
        assert site.http.get("/cache/doctor").json()["nonces_removed"] == 3


def test_a_server_that_keeps_nonces_leaves_the_prompt_as_it_is(served_model: ServedModel, tmp_path: Path) -> None:
    with running_site(replace(served_model, nonce_filter=None), tmp_path) as site:
        assert tokens(site, f"{HEADER}36ee5;\n{RULES}") != tokens(site, f"{HEADER}0aaa9;\n{RULES}")
        assert "nonces_removed" not in site.http.get("/cache/doctor").json()
