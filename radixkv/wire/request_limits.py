"""Checks of a request that its edge makes, and the runtime again: any program may write to its socket."""

from __future__ import annotations

import re
from collections.abc import Collection

from radixkv.errors import InvalidRequest, context_length_exceeded, shortened
from radixkv.settings.checks import MAX_LORA_NAME_CHARACTERS, is_number

MAX_SALT_BYTES = 128
"""Longest ``cache_salt``, in UTF-8."""
MAX_SESSION_ID_BYTES = 128
"""Longest ``session_id``, in UTF-8."""
DEFAULT_TTL_S = 300.0
"""Time for which a client pins a prefix if it does not say how long, in seconds."""
MAX_TTL_S = 24 * 3600
"""Longest time for which a prefix is pinned at once, in seconds."""
MAX_PINS = 4
"""Most prefixes of one request's prompt that are pinned."""
MAX_MATCHED_TOKENS = 1 << 18
"""Most tokens of the prompts of a ``Match`` together: with a disk tier the runtime digests all of them at once."""
_TTL = re.compile(r"(\d{1,6})([smh])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def check_ids(ids: Collection[int], vocab_size: int, field: str) -> None:
    """Raises ``InvalidRequest`` if an id is outside the vocabulary. O(ids)."""
    if len(ids) == 0:  # an array has no truth value
        return
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest >= vocab_size:
        raise InvalidRequest(
            f"{field} has token id {shortened(int(lowest if lowest < 0 else highest))}, which is outside the "
            f"vocabulary of {vocab_size}",
            param=field,
        )


def check_session_id(session_id: str) -> None:
    """Raises ``InvalidRequest`` for a ``session_id`` longer than ``MAX_SESSION_ID_BYTES``."""
    n_bytes = len(session_id.encode("utf-8", "surrogatepass"))
    if n_bytes > MAX_SESSION_ID_BYTES:
        raise InvalidRequest(f"session_id has {n_bytes} bytes; at most {MAX_SESSION_ID_BYTES}", param="session_id")


def check_lora_name(name: object) -> str:
    """Returns the name of an adapter. Raises ``InvalidRequest`` if it is no text of printable characters."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_LORA_NAME_CHARACTERS:
        raise InvalidRequest(
            f"lora_name is {shortened(name)}; give 1 to {MAX_LORA_NAME_CHARACTERS} printable characters",
            param="lora_name",
        )
    return name


def check_cache_salt(salt: str) -> None:
    """Raises ``InvalidRequest`` for a ``cache_salt`` longer than ``MAX_SALT_BYTES``."""
    n_bytes = len(salt.encode("utf-8", "surrogatepass"))
    if n_bytes > MAX_SALT_BYTES:
        raise InvalidRequest(f"cache_salt has {n_bytes} bytes; at most {MAX_SALT_BYTES}", param="cache_salt")


def check_expected_pause(pause_s: float | None) -> None:
    """Raises ``InvalidRequest`` for an ``expected_pause_s`` below 0 or above ``MAX_TTL_S``."""
    if pause_s is not None and not (is_number(pause_s) and 0 <= pause_s <= MAX_TTL_S):  # also catches NaN
        raise InvalidRequest(
            f"expected_pause_s is {shortened(pause_s)}; it must be between 0 and {MAX_TTL_S} seconds",
            param="expected_pause_s",
        )


def check_ttl(ttl_s: float, field: str) -> None:
    """Raises ``InvalidRequest`` for a time to live below 0 or above ``MAX_TTL_S``."""
    if not (is_number(ttl_s) and 0 <= ttl_s <= MAX_TTL_S):  # also catches NaN
        raise InvalidRequest(
            f"a ttl of {shortened(ttl_s)} seconds; it must be between 0 and {MAX_TTL_S} (24h)", param=field
        )


def parse_ttl(text: str, field: str) -> float:
    """Returns the seconds of a time to live such as ``90s``, ``5m`` or ``12h``. Raises ``InvalidRequest``."""
    match = _TTL.fullmatch(text)
    if match is None:
        raise InvalidRequest(
            "the ttl is no whole number of seconds, minutes or hours; give one such as 90s, 5m or 12h",
            param=field,
        )
    ttl_s = float(match[1]) * _SECONDS[match[2]]
    check_ttl(ttl_s, field)
    return ttl_s


def check_prefix(n_tokens: int, page_size: int) -> None:
    """Raises ``InvalidRequest`` for a prefix of less than one page, which the cache cannot find."""
    if n_tokens < page_size:
        raise InvalidRequest(
            f"the prefix has {n_tokens} tokens, fewer than a page of {page_size}; give a longer one",
            param="prompt",
        )


def check_length(
    n_prompt: int,
    max_tokens: int | None,
    max_prompt_and_answer: int,
    *,
    max_tokens_field: str = "max_tokens",
    prompt_field: str = "prompt",
    reason: str | None = None,
) -> int:
    """Returns how many tokens the answer to a prompt can have.

    Args:
        n_prompt: tokens of the prompt.
        max_tokens: tokens that the answer must be able to have; None for at least one.
        max_prompt_and_answer: most tokens of both together.
        max_tokens_field: the field with ``max_tokens``.
        prompt_field: the field with the prompt.
        reason: why ``max_prompt_and_answer`` is lower than the model's own limit, if it is.

    Raises:
        ContextLengthExceeded: they do not fit; ``param`` is the field to reduce.
    """
    room = max_prompt_and_answer - n_prompt
    if room < 1:
        error = context_length_exceeded(
            f"the prompt has {n_prompt} tokens, which leaves none for an answer",
            max_prompt_and_answer,
            param=prompt_field,
            n_prompt=n_prompt,
        )
    elif max_tokens is not None and max_tokens > room:
        error = context_length_exceeded(
            f"you requested {n_prompt + max_tokens} tokens ({n_prompt} in the {prompt_field}, {max_tokens} in the "
            f"completion): {max_tokens_field} is {max_tokens}",
            max_prompt_and_answer,
            advice=f"reduce it to at most {room}",
            param=max_tokens_field,
        )
    else:
        return room
    error.reason = reason
    raise error


def check_pooled_length(
    n_prompt: int, max_pooled: int, reason: str | None = None, *, field: str = "prompt"
) -> None:
    """Raises ``ContextLengthExceeded`` for a prompt that is too long, of a request that has no answer.

    Args:
        n_prompt: tokens of the prompt.
        max_pooled: most tokens of such a prompt.
        reason: why that is lower than the model's own limit, if it is.
        field: the field with the prompt.
    """
    if n_prompt > max_pooled:
        error = context_length_exceeded(
            f"the {field} has {n_prompt} tokens", max_pooled, param=field, n_prompt=n_prompt
        )
        error.reason = reason
        raise error
