"""The adapters that an engine is started with, as vLLM and SGLang write them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from radixkv.errors import ConfigError, shortened
from radixkv.settings.checks import MAX_LORA_NAME_CHARACTERS

_FORMS = "give NAME=FOLDER, as in --lora-modules sql=/adapters/sql"
_NAME_FIELDS, _PATH_FIELDS = ("name", "lora_name"), ("path", "lora_path")
"""By vLLM and by SGLang."""
_OTHER_FIELDS = ("base_model_name", "pinned", "lora_id")


@dataclass(frozen=True)
class LoraModule:
    """An adapter, by the name that requests give as their model."""

    name: str
    path: str
    """Of its folder."""

    def __str__(self) -> str:
        """Returns the text that a flag takes."""
        return f"{self.name}={self.path}"


def as_lora_modules(value: Any) -> Any:
    """Returns adapters of a mapping of names to folders, or of a list as vLLM's and SGLang's flags take it.

    An item of a list is ``NAME=FOLDER``, a folder, which is its name, too, or JSON with both. Raises
    ``ConfigError``, which begins with the value.
    """
    if isinstance(value, Mapping):
        return tuple(_module(name, path) for name, path in value.items())
    if isinstance(value, str):
        return (_parsed(value),)
    if isinstance(value, Sequence):
        return tuple(one if isinstance(one, LoraModule) else _parsed(one) for one in value)
    return value


def check_lora_modules(name: str, value: object) -> None:
    """Refuses what are no adapters, and two of the same name."""
    if not isinstance(value, tuple) or not all(isinstance(one, LoraModule) for one in value):
        raise ConfigError(f"{name} is {shortened(value)}; give a mapping of names to folders")
    names = [one.name for one in value]
    for one in value:
        if not one.name or not one.path:
            raise ConfigError(f"{name} {shortened(str(one))} lacks a name or a folder; {_FORMS}")
        if not one.name.isprintable() or len(one.name) > MAX_LORA_NAME_CHARACTERS:
            raise ConfigError(
                f"{name} has an adapter of the name {shortened(one.name)}; give it one of at most "
                f"{MAX_LORA_NAME_CHARACTERS} printable characters"
            )
        if names.count(one.name) > 1:
            raise ConfigError(f"{name} has two adapters of the name {shortened(one.name)}; give each its own name")


def _module(name: object, path: object) -> LoraModule:
    if not isinstance(name, str) or not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{shortened(name)}: {shortened(path)} is no adapter; {_FORMS}")
    return LoraModule(name, str(path))


def _parsed(item: Any) -> LoraModule:
    if isinstance(item, str) and item.lstrip().startswith("{"):
        try:
            item = msgspec.json.decode(item)
        except msgspec.MsgspecError:
            raise ConfigError(f"{shortened(item)} is neither JSON nor NAME=FOLDER; {_FORMS}") from None
    if isinstance(item, Mapping):
        unknown = item.keys() - {*_NAME_FIELDS, *_PATH_FIELDS, *_OTHER_FIELDS}
        if unknown:
            raise ConfigError(f"{shortened(dict(item))} has the unknown field {shortened(min(unknown))}; {_FORMS}")
        name = next((item[field] for field in _NAME_FIELDS if field in item), None)
        return _module(name, next((item[field] for field in _PATH_FIELDS if field in item), None))
    if not isinstance(item, str):
        raise ConfigError(f"{shortened(item)} is no adapter; {_FORMS}")
    name, equals, path = item.partition("=")
    return LoraModule(name, path) if equals else LoraModule(item, item)
