"""Tests that the commands and links in README and docs work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import radixkv.cli
from radixkv.settings.arguments import Parser
from support.paths import ROOT

FOLDERS = ("docs", "examples", "radixkv")
PAGES = sorted([*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))])


def _commands(page: Path) -> set[str]:
    """Returns the commands in a page's code blocks, without ``radixkv`` and without synopses with brackets."""
    text = page.read_text().replace("\\\n", " ")
    lines = "".join(re.split(r"^```.*$", text, flags=re.M)[1::2]).splitlines()
    lines += re.findall(r"^ {4}(.*)$", text, re.M)
    found = (re.match(r"(?:\$ )?radixkv (?!\w+: error: )(.*)", line) for line in lines if "[--" not in line)
    return {shlex.join(shlex.split(match[1], comments=True)) for match in found if match}


COMMANDS = sorted(set[str]().union(*map(_commands, PAGES)))


def _anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 30


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_parses(command: str) -> None:
    arguments = shlex.split(command)
    args, unknown = radixkv.cli.parser_for(arguments).parse_known_args(arguments)
    assert unknown == []
    parser: Parser = args.parser
    assert command.startswith(" ".join(parser.prog.split()[1:]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_link_targets_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("https://"):
            name, _, anchor = target.partition("#")
            path = page.parent / name if name else page
            assert path.exists(), target
            assert not anchor or anchor in _anchors(path), target
