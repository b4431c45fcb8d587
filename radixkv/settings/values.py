"""Values of settings as users write them: numbers, sizes such as ``64GiB``, and names of other engines."""

from __future__ import annotations

import math
import os
import re
from fractions import Fraction
from typing import Any

from radixkv.errors import ConfigError, shortened

_NUMBER = r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?"
_COUNT = re.compile(_NUMBER + "(?:([kmgt])|([KMGT]i?|[kmgt]i))")
_BYTES = re.compile(_NUMBER + "(?:([kmgt]|[kmgtKMGT][bB])|([KMGT]|[kmgtKMGT][iI][bB]?)|[bB])")
_STEPS = " KMGT"
_NUMBER_OF_UNITS = re.compile(r"[0-9]+(\.[0-9]+)?")


def parse_whole_number(text: str) -> int:
    """Returns a whole number. Raises ``ConfigError``, which begins with the text."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{shortened(text)} is not a whole number") from None


def parse_number(text: str) -> float:
    """Returns a number, which may be infinite. Raises ``ConfigError``, which begins with the text."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ConfigError(f"{shortened(text)} is not a number")
    return value


def parse_count(text: str) -> int:
    """Returns a number of tokens or other things; ``4k`` is 4,000, ``4K`` and ``4Ki`` are 4,096, as in vLLM.

    Raises:
        ConfigError: the text is not such a number. The error begins with the text.
    """
    try:
        return int(text)
    except ValueError:
        match = _COUNT.fullmatch(text.strip())
    count = None if match is None else _value(match[1], match[2], match[3])
    if count is None or count.denominator != 1:
        raise ConfigError(
            f"{shortened(text)} is not a whole number; give one such as 4096, 4k (4,000) or 4K (4,096)"
        )
    return int(count)


def parse_bytes(text: str) -> int:
    """Returns a number of bytes: ``64GiB`` and ``64G`` are 64 * 2**30, ``64GB`` and ``64g`` 64 * 10**9, as in vLLM.

    A part of a byte is dropped.

    Raises:
        ConfigError: the text is not a size. The error begins with the text.
    """
    try:
        return int(text)
    except ValueError:
        match = _BYTES.fullmatch(text.strip())
    if match is None:
        forms = "64GiB or 64G (of 2**30 bytes), 64GB or 64g (of 10**9)"
        raise ConfigError(f"{shortened(text)} is not a size; give one such as {forms}, or a number of bytes")
    return int(_value(match[1], match[2], match[3]))


def _value(number: str, decimal_unit: str | None, binary_unit: str | None) -> Fraction:
    """Returns a number times its unit, of which the first letter counts."""
    unit = decimal_unit or binary_unit or " "
    factor: int = (1000 if decimal_unit else 1024) ** _STEPS.index(unit[0].upper())
    return Fraction(number) * factor


def as_count(value: Any) -> Any:
    """Returns the number that a text such as ``4k`` gives; other values as they are. Raises ``ConfigError``."""
    return parse_count(value) if isinstance(value, str) else value


def as_bytes(value: Any, unit: int | None = None) -> Any:
    """Returns a size in bytes, which may be a text; other values as they are. Raises ``ConfigError``.

    Args:
        value: the size.
        unit: how many bytes a number without a unit counts; None: it counts bytes, and has no fraction.
    """
    if isinstance(value, str):
        if unit is None or not _NUMBER_OF_UNITS.fullmatch(value.strip()):
            return parse_bytes(value)
        value = float(value)
    if unit is None or isinstance(value, bool) or not isinstance(value, int | float):
        return value
    size = value * unit
    return int(size) if isinstance(size, int) or math.isfinite(size) else size


def as_text(value: Any) -> Any:
    """Returns a path as a text; other values as they are."""
    return str(value) if isinstance(value, os.PathLike) else value


def dtype_name(dtype: object) -> str:
    """Returns the canonical name of a dtype: ``float16`` for ``half`` and for ``torch.float16``."""
    name = str(dtype).removeprefix("torch.")
    return {"half": "float16", "float": "float32"}.get(name, name)


def task_name(value: Any) -> Any:
    """Returns our name of a task for vLLM's; any other value as it is."""
    return {"auto": "generate", "embedding": "embed"}.get(value, value) if isinstance(value, str) else value


def write_policy_name(policy: Any) -> Any:
    """Returns our name of a write policy of SGLang; other values as they are."""
    return {"write_through": "through", "write_through_selective": "selective"}.get(str(policy), policy)


def attention_backend_name(backend: Any) -> Any:
    """Returns our name of an attention backend of vLLM; other values as they are."""
    return {"FLASHINFER": "flashinfer", "TRITON_ATTN": "triton"}.get(str(backend), backend)
