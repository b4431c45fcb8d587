"""Removal of known nonces from system messages."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.generation.nonces import NonceFilter

HEADER = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;"
RULES = "You are Claude Code."


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"{HEADER}\n{RULES}", RULES),
        (f"{HEADER}\n\n{RULES}", RULES),
        ([part(HEADER), part(RULES, cache_control={})], [part(RULES, cache_control={})]),
        ([part(f"{HEADER}\n{RULES}"), part("b")], [part(RULES), part("b")]),
    ],
    ids=["text", "blank line", "part", "start of a part"],
)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_billing_header_of_claude_code_is_removed(role: str, content: Any, expected: Any) -> None:
    nonces, user = NonceFilter(), {"role": "user", "content": "Hi"}
    assert nonces.remove([{"role": role, "content": content}, user]) == [{"role": role, "content": expected}, user]
    assert nonces.n_removed == 1


def test_a_message_that_was_nothing_else_is_left_out() -> None:
    user = {"role": "user", "content": "Hi"}
    for content in (HEADER, HEADER + "\n", [part(HEADER)]):
        assert NonceFilter().remove([{"role": "system", "content": content}, user]) == [user]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": f"{HEADER}\n{RULES}"},
        {"role": "system", "content": f"Explain the text {HEADER}\nto me."},
        {"role": "system", "content": ""},
        {"role": "system", "content": []},
        {"role": "system", "content": None},
        {"role": "system", "content": [5, {"type": "text"}, {"type": "text", "text": 5}]},
        {"content": HEADER},
    ],
    ids=["user", "quoted", "empty", "no parts", "null", "malformed parts", "no role"],
)
def test_everything_else_stays(message: dict[str, Any]) -> None:
    nonces = NonceFilter()
    assert nonces.remove([message]) == [message]
    assert nonces.n_removed == 0


def test_the_messages_of_the_caller_are_not_changed() -> None:
    message = {"role": "system", "content": [part(f"{HEADER}\n{RULES}")]}
    NonceFilter().remove([message])
    assert message == {"role": "system", "content": [part(f"{HEADER}\n{RULES}")]}
