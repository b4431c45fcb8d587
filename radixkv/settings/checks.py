"""Checks of the values of settings; each raises ``ConfigError`` with the setting's name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import unquote, urlsplit

from radixkv.errors import ConfigError, shortened
from radixkv.settings.values import parse_bytes

Check = Callable[[str, Any], None]
"""Takes the name of a setting and its value, and raises ``ConfigError`` if that is wrong."""

MIN_PRIORITY, MAX_PRIORITY = -(1 << 31), (1 << 31) - 1
MAX_KEY_CHARACTERS = 1024
MAX_COUNT = (1 << 31) - 1
"""Most of anything that is counted: tokens, requests, batches."""
MAX_LORA_RANK = 128
"""Highest rank of an adapter."""
MAX_LORA_NAME_CHARACTERS = 256
"""Longest name of an adapter."""
MAX_BYTES = 1 << 60
"""Largest size in bytes; whether there is as much memory is found out later."""
MAX_SECONDS = 1e9
"""Longest time, in seconds or milliseconds: timers take no longer one."""
_CACHE_URL = re.compile(
    r"file:///[^?#@\s]+|"
    r"shm://[A-Za-z0-9][A-Za-z0-9._-]{0,99}\?size=[0-9A-Za-z.]+(&folder=/[^?#@&\s]*)?|"
    r"(s3://[A-Za-z0-9._-]+|mooncake://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5})(/[^?#@\s]*)?",
    re.ASCII,
)
_API_KEY_PATTERN = re.compile(rf"[!-~]{{1,{MAX_KEY_CHARACTERS}}}")


def check_integer(name: str, value: object) -> int:
    """Returns the value. Refuses what is no whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} {shortened(value)} must be a whole number")
    return value


def check_at_least(minimum: int, name: str, value: object, maximum: int = MAX_COUNT) -> None:
    """Refuses what is no whole number from ``minimum`` to ``maximum``."""
    number = check_integer(name, value)
    if number < minimum:
        raise ConfigError(f"{name} {shortened(value)} must be at least {minimum}")
    if number > maximum:
        raise ConfigError(f"{name} {shortened(value)} must be at most {maximum}")


def check_bytes(name: str, value: object) -> None:
    """Refuses what is no size in bytes above 0."""
    check_at_least(1, name, value, MAX_BYTES)


def check_at_most(maximum: int, shown: str, name: str, value: object) -> None:
    """Refuses what is no whole number from 0 to ``maximum``, which the error names as ``shown``."""
    if not 0 <= check_integer(name, value) <= maximum:
        raise ConfigError(f"{name} {shortened(value)} is not between 0 and {shown}")


def check_bool(name: str, value: object) -> None:
    """Refuses what is neither True nor False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} {shortened(value)} must be True or False")


def is_number(value: object) -> TypeGuard[int | float]:
    """Returns whether the value is a number, which may be NaN or infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_number(
    low: float, high: float, must_be: str, name: str, value: object, *, excludes_low: bool = False
) -> None:
    """Refuses what is no number from ``low`` to ``high``, which the error says by ``must_be``."""
    if not (is_number(value) and low <= value <= high) or (excludes_low and value == low):  # also catches NaN
        raise ConfigError(f"{name} {shortened(value)} must be {must_be}")


def check_seconds(name: str, value: float | None, unit: str = "seconds") -> None:
    """Refuses what is neither None nor a number above 0 and of at most ``MAX_SECONDS``."""
    if value is not None:
        must_be = f"a number of {unit} above 0 and of at most {MAX_SECONDS:.0f}"
        check_number(0, MAX_SECONDS, must_be, name, value, excludes_low=True)


def check_text(what: str, name: str, value: object) -> None:
    """Refuses an empty text, and what is no text. ``what`` says what to give instead."""
    if not isinstance(value, str) or not value:
        is_what = "empty" if value == "" else shortened(value)
        raise ConfigError(f"{name} is {is_what}; give {what}, or leave it out")


def check_choice(
    choices: Sequence[str], is_what: str, name: str, value: object, *, show: Callable[[str], str] = str
) -> None:
    """Refuses what is none of the choices, with an error that says what it is instead, and shows the choices."""
    if value not in choices:
        *others, last = map(show, choices)
        raise ConfigError(f"{name} {shortened(value)} is {is_what}; use {', '.join(others)} or {last}")


def check_priority_range(name: str, priorities: object) -> None:
    """Refuses what is neither None nor a pair of priorities around 0."""
    if priorities is None:
        return
    if not isinstance(priorities, tuple) or len(priorities) != 2:
        raise ConfigError(f"{name} {shortened(priorities)} must be a pair: the lowest and the highest priority")
    lowest, highest = (check_integer(name, priority) for priority in priorities)
    if not MIN_PRIORITY <= lowest <= 0 <= highest <= MAX_PRIORITY:
        raise ConfigError(
            f"{name} {shortened(priorities)} must contain 0, the priority of requests that set none, and "
            "lie between -2**31 and 2**31 - 1"
        )


def check_api_key(name: str, key: object) -> None:
    """Refuses a key that no client can send. The error does not contain the key."""
    if not (isinstance(key, str) and _API_KEY_PATTERN.fullmatch(key)):
        raise ConfigError(
            f"{name} must be 1 to {MAX_KEY_CHARACTERS} visible ASCII characters, without spaces; choose another"
        )


def check_cache_url(name: str, url: object) -> None:
    """Refuses what is no store that servers share. The error does not contain a password."""
    if not (isinstance(url, str) and _CACHE_URL.fullmatch(url)):
        what = "has a user or password (S3: use AWS_*)" if "@" in str(url) else f"{shortened(url)} is no store"
        raise ConfigError(
            f"{name} {what}; use s3://BUCKET/PREFIX, mooncake://HOST:PORT, file:///FOLDER, shm://NAME?size=SIZE or "
            "shm://NAME?size=SIZE&folder=FOLDER"
        )
    if url.startswith("shm:"):
        size = url.partition("?size=")[2].partition("&")[0]
        try:
            check_bytes("size", parse_bytes(size))
        except ConfigError as error:
            raise ConfigError(f"{name} {shortened(url)}: {error}") from error
    if url.startswith(("file:", "shm:")) and not _is_path(url):
        raise ConfigError(
            f"{name} {shortened(url)} has %00 or bytes that are no UTF-8 in its path; name it otherwise"
        )


def check_apart(cache_dir: str, cache_url: str) -> None:
    """Refuses a folder of the disk tier that is, contains, or is in the folder that servers share."""
    if not cache_url.startswith("file:"):
        return
    own = Path(os.path.realpath(Path(cache_dir).expanduser()))
    shared = Path(os.path.realpath(unquote(urlsplit(cache_url).path)))
    if own.is_relative_to(shared) or shared.is_relative_to(own):
        where = "are the same folder" if own == shared else "are one inside the other"
        raise ConfigError(
            f"cache_dir {shortened(cache_dir)} and cache_url {shortened(cache_url)} {where}; the disk tier belongs "
            "to one server, so give two folders apart"
        )


def _is_path(url: str) -> bool:
    """Returns whether the escapes of a URL are those of a path that can be opened."""
    try:
        return "\0" not in unquote(url, errors="strict")
    except UnicodeDecodeError:
        return False
