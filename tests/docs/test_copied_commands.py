"""Tests that what a reader copies from README and docs works: each block runs as printed, or says what it needs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from support.documented_pages import NEEDS, blocks, complaint, is_run, run_page
from support.paths import ROOT

README = ROOT / "README.md"
PAGES = sorted([README, *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
RUN = [page for page in PAGES if any(map(is_run, blocks(page)))]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_runs_or_says_what_it_needs(page: Path) -> None:
    complaints = [f"line {block.line}: {text}" for block in blocks(page) if (text := complaint(block))]
    indented = re.findall(r"(?:^|\n\n)    (?:\$ )?((?:radixkv|python|curl) .*)", page.read_text())
    assert complaints == []
    assert indented == [], "commands in indented blocks are not run; fence them"


def test_most_pages_with_commands_run_some_of_them() -> None:
    with_commands = [page for page in PAGES if any(block.is_commands for block in blocks(page))]
    assert README in RUN
    assert len(RUN) >= len(with_commands) - 4
    used = {block.needs for page in PAGES for block in blocks(page)} - {None}
    assert used == set(NEEDS), "a kind that no block has may go"


def test_what_the_readme_prints_works_in_its_order(tmp_path: Path) -> None:
    printed = run_page(README, tmp_path)
    assert all(found in printed for found in ("41 + 11 = 52", "prompt tokens are cached", "#### green", "Hit rate"))


GIVES = {
    "README.md": r"same-first(.|\n)*storage",
    "beam-search.md": r"stop (.|\n)*Answer: The dress of Kenji is green",
    "cache-misses.md": r"tools_changed(.|\n)*system_changed",
    "events.md": r"following",
    "lifetimes.md": r'"pinned_tokens":[1-9](.|\n)* are pinned for ',
    "server.md": r'"matched_tokens"',
    "structured.md": r'\{\\"hour\\": ?\d',
    "tenants.md": r'"cached_tokens":[1-9](.|\n)*radixkv:tenant_',
    "tools.md": r"windy.* 23 ",
    "ui.md": r"Hit rate",
}
"""What the output of a page has besides: an answer that is not empty, or what the page is about."""


@pytest.mark.nightly
@pytest.mark.parametrize("page", [page for page in RUN if page != README], ids=name)
def test_what_a_page_prints_works_in_its_order(page: Path, tmp_path: Path) -> None:
    assert re.search(GIVES.get(page.name, ""), run_page(page, tmp_path))


def test_the_provider_of_codex_has_all_that_it_demands() -> None:
    (block,) = (block for block in blocks(ROOT / "docs" / "agents.md") if block.language == "toml")
    settings = tomllib.loads(block.text)
    provider = settings["model_providers"][settings["model_provider"]]
    assert provider.keys() >= {"name", "base_url", "env_key", "wire_api"}
    assert provider["wire_api"] == "responses"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- needs: luck -->\n```\nradixkv serve\n```\n", "luck"),
        ("<!-- nedes: a GPU -->\n```\nradixkv serve\n```\n", "unknown"),
        ("<!-- needs: a GPU -->\n```\n{}\n```\n", "no command"),
    ],
)
def test_a_wrong_mark_is_found(tmp_path: Path, text: str, message: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    (block,) = blocks(page)
    assert message in str(complaint(block))


@pytest.mark.parametrize("command", ["radixkv plan tiny", "$ curl -s localhost:8000/nowhere", "python nothing.py"])
def test_a_command_that_fails_is_found(tmp_path: Path, command: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```\n{command}\necho radixkv serve\n```\n")
    with pytest.raises(AssertionError, match="page.md:1"):
        run_page(page, tmp_path / "folder")
