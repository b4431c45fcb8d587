"""Tests of ``radixkv explain --request`` with a fake server; tests/e2e has tests with a real one."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.cli import main
from support.fake_openai import FakeServer

PATH = "/cache/tables?request=chatcmpl-1%262"


def page(logical: int, physical: int | None, filled: int = 16, **changes: Any) -> dict[str, Any]:
    fields = {"logical": logical, "physical": physical, "filled": filled, "kind": "tree", "references": 2}
    return {**fields, "tier": "device", **changes}


def choice(**changes: Any) -> dict[str, Any]:
    counts = {
        "prompt_tokens": 20,
        "tokens": 37,
        "stored_tokens": 37,
        "pages": 3,
        "in_tree": 2,
        "shared": 1,
        "own": 1,
    }
    return {"index": 0, "phase": "running", **counts, "tiers": {"device": 3}, "batch_slot": 4, **changes}


def shown(fake: FakeServer, capsys: pytest.CaptureFixture[str], *choices: dict[str, Any], **more: Any) -> list[str]:
    request = {"id": "1&2", "request_id": "mine", "choices": choices, **more}
    reply = {"page_size": 16, "pool": {}, "requests": [request], "more": 0}
    fake.responses = {PATH: lambda _: reply}
    assert main(["explain", "--request", "chatcmpl-1&2", "--base-url", fake.address]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_table_is_drawn_as_logical_and_physical_pages(
    fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    table = [page(0, 117), page(1, 3, references=1), page(2, 9, 5, kind="own", references=1)]
    assert shown(fake, capsys, choice(table=table)) == [
        "request 1&2, 16 tokens a page",
        "choice 0, running: 37 tokens, 20 of the prompt; 3 pages: 2 in the tree, 1 of these shared with other "
        "block tables, 1 own; batch slot 4",
        "  logical  physical  filled  references    tier  page",
        "        0       117   16/16           2  device  tree",
        "        1         3   16/16           1  device  tree",
        "        2         9    5/16           1  device   own",
    ]


def test_columns_and_counts_that_apply_follow(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    table = [
        page(0, None, 0, kind="freed", references=0, tier=None),
        page(1, 8, kind="loading", references=1, tier="host", slot=21),
        page(2, 9, state_slot=6, window_page=2),
    ]
    waits_for = "1 page to be copied from the host tier to the device"
    more = {"waits_for": waits_for, "freed": 1, "window_pages": 1, "pages": 5}
    lines = shown(
        fake, capsys, choice(table=table, **more), choice(index=1, phase="following", table=[]), replica=1
    )
    assert lines[0] == "request 1&2 in replica 1, 16 tokens a page"
    assert f"; it waits for {waits_for}; " in lines[1]
    assert "; 1 freed; 1 window page" in lines[1]
    assert lines[2].split() == (
        "logical physical filled references tier page host slot window page state slot".split()
    )
    assert [line.split() for line in lines[3:6]] == [
        "0 - 0/16 0 - freed - - -".split(),
        "1 8 16/16 1 host loading 21 - -".split(),
        "2 9 16/16 2 device tree - 2 6".split(),
    ]
    assert lines[6] == "  2 further pages not shown"
    assert lines[7].startswith("choice 1, following: 37 tokens")
    assert len(lines) == 8


def test_a_request_that_has_ended_says_so(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake.responses = {PATH: lambda _: {"error": {"message": "no running request has this id"}}}
    fake.status = 404
    assert main(["explain", "--request", "chatcmpl-1&2", "--base-url", fake.address]) == 1
    assert "no running request has this id" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more", [["a prompt"], ["--file", "x"], ["--cache-salt", "s"], ["--model", "m"]], ids=" ".join
)
def test_a_prompt_beside_a_request_is_refused(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--request", "a", *more])
    assert "--request" in capsys.readouterr().err


def test_ids_of_servers_do_not_control_the_terminal(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b" not in "".join(shown(fake, capsys, choice(table=[], phase="\x1b[2J")))
