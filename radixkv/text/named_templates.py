"""The chat templates in the files of a checkpoint, by name."""

from __future__ import annotations

from pathlib import Path

from radixkv.checkpoints.files import read_object, read_text
from radixkv.errors import CheckpointError

DEFAULT = "default"
FOLDER = "additional_chat_templates"


def find_templates(folder: Path) -> dict[str, tuple[str, str]]:
    """Returns the text of each template and where it comes from. A single template is named ``default``.

    Templates are in ``chat_template.jinja`` and the folder ``additional_chat_templates``, in ``chat_template.json``
    and in ``tokenizer_config.json``. What an earlier one of these has goes before a later one.

    Args:
        folder: the folder of the tokenizer.

    Raises:
        CheckpointError: a file cannot be read, or ``chat_template`` in one is malformed.
    """
    paths = {DEFAULT: folder / "chat_template.jinja"}
    paths |= {path.stem: path for path in sorted((folder / FOLDER).glob("*.jinja"))}
    found = {name: (text, str(path)) for name, path in paths.items() if (text := read_text(path)) is not None}
    if DEFAULT in found:
        return found
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (value := (read_object(folder / name) or {}).get("chat_template")) is not None:
            origin = f"{folder / name}: chat_template"
            return {each: (text, origin) for each, text in _named(value, origin).items()} | found
    return found


def _named(value: object, origin: str) -> dict[str, str]:
    if isinstance(value, str):
        return {DEFAULT: value}
    items = [{"name": name, "template": text} for name, text in value.items()] if isinstance(value, dict) else value
    named: dict[str, str] = {}
    for item in items if isinstance(items, list) and items else [None]:
        match item:
            case {"name": str(name), "template": str(template)}:
                named[name] = template
            case _:
                raise CheckpointError(
                    f"{origin} is neither a text nor templates with names; choose a file with --chat-template"
                )
    return named
