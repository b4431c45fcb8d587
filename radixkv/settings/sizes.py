"""Sizes as people write them: numbers of tokens such as ``4k``, and of bytes such as ``64GiB``."""

from __future__ import annotations

import re
from fractions import Fraction

from radixkv.errors import ConfigError, shortened

_NUMBER = r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?"
_COUNT = re.compile(_NUMBER + "(?:([kmgt])|([KMGT]i?|[kmgt]i))")
_BYTES = re.compile(_NUMBER + "(?:([kmgt]|[kmgtKMGT][bB])|([KMGT]|[kmgtKMGT][iI][bB]?)|[bB])")
_STEPS = " KMGT"


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
