"""How one request's tokens are chosen, and when it ends."""

from __future__ import annotations

import math
from types import NoneType
from typing import TypeVar

import msgspec

from radixkv.config import MAX_SEED
from radixkv.errors import InvalidRequest, shortened

KindT = TypeVar("KindT")

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 64
MAX_STOP_TOKEN_IDS = 64


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings of one request, validated whenever one is made, also when decoded from the wire.

    Raises:
        InvalidRequest: naming the field, its value and the range.
    """

    max_tokens: int | None = 16
    """Most tokens to generate; None: to the end of the context."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 or -1 for all."""
    seed: int | None = None
    """The same seed, prompt and settings give the same tokens, whoever else is in the batch."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these strings."""
    stop_token_ids: tuple[int, ...] = ()
    """The answer ends with the first of these tokens."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token."""

    def __post_init__(self) -> None:
        # The wire gives the declared types; a caller in Python may give anything.
        msgspec.structs.force_setattr(self, "stop", _tuple_of(str, "stop", self.stop))
        msgspec.structs.force_setattr(self, "stop_token_ids", _tuple_of(int, "stop_token_ids", self.stop_token_ids))
        for name, number in (("temperature", self.temperature), ("top_p", self.top_p)):
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise _out_of_range(name, number, "a number")
        for name, count in (("max_tokens", self.max_tokens), ("seed", self.seed), ("top_k", self.top_k)):
            if (
                isinstance(count, bool)
                or not isinstance(count, (int, NoneType))
                or (name, count) == ("top_k", None)
            ):
                raise _out_of_range(name, count, "a whole number")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise _out_of_range("max_tokens", self.max_tokens, "at least 1")
        if not 0.0 <= self.temperature <= 100.0:  # also catches NaN
            raise _out_of_range("temperature", self.temperature, "between 0 and 100")
        if not (0.0 < self.top_p <= 1.0) or math.isnan(self.top_p):
            raise _out_of_range("top_p", self.top_p, "above 0 and at most 1")
        if not -1 <= self.top_k < 1 << 31:
            raise _out_of_range("top_k", self.top_k, "0 or -1 for all tokens, or a positive count")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise _out_of_range("seed", self.seed, "between 0 and 2**63 - 1")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS}", param="stop")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise InvalidRequest(
                    f"a stop string has {len(text)} characters; it needs 1 to {MAX_STOP_CHARACTERS}",
                    param="stop",
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS}",
                param="stop_token_ids",
            )


def _tuple_of(kind: type[KindT], name: str, value: object) -> tuple[KindT, ...]:
    """One value, or a list of them, as a tuple."""
    values = (value,) if isinstance(value, str | int) else value
    if not isinstance(values, list | tuple) or not all(type(one) is kind for one in values):
        raise _out_of_range(name, value, f"a list of {kind.__name__}")
    return tuple(values)


def _out_of_range(name: str, value: object, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {shortened(value)}; it must be {allowed}", param=name)
