"""The table of settings in docs/server.md is that of their definitions.

``PYTHONPATH=. python tests/docs/test_settings_doc.py`` writes it anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from radixkv.settings.arguments import spelled
from radixkv.settings.config import ENGINE_SETTINGS, EngineConfig
from radixkv.settings.server_config import ServerConfig
from radixkv.settings.setting import settings_of

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
HEAD = "| flag | other names | `LLM` | meaning |\n|---|---|---|---|\n"


def rows() -> Iterator[str]:
    """Yields the rows of the table: the settings of the server, then those of the engine."""
    settings = settings_of(ServerConfig) | settings_of(EngineConfig) | ENGINE_SETTINGS
    for name, one in settings.items():
        flag, *aliases = spelled(dict.fromkeys((one.flag, *one.aliases)))
        keyword = f"`{name}`" if name in ENGINE_SETTINGS else ""
        yield _row(flag, aliases, keyword, one.help % {"default": one.default})
        if one.opposites:
            flag, *aliases = spelled(one.opposites)
            yield _row(flag, aliases, "", one.opposites_help)


def _row(flag: str, aliases: list[str], keyword: str, meaning: str) -> str:
    return f"| `{flag}` | {', '.join(f'`{alias}`' for alias in aliases)} | {keyword} | {meaning} |\n"


def with_table(text: str) -> str:
    """Returns the page with the table written anew."""
    before, _, rest = text.partition(HEAD)
    return before + HEAD + "".join(rows()) + rest[rest.index("\n\n") + 1 :]


def test_the_table_has_each_setting_as_it_is_defined() -> None:
    text = PAGE.read_text()
    assert HEAD in text
    assert text == with_table(text), "write it anew as the head of this file says"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
