"""How one request's tokens are chosen, and when it ends."""

from __future__ import annotations

import math
from numbers import Integral, Real
from types import NoneType
from typing import Any, TypeVar

import msgspec

from radixkv import compat
from radixkv.config import MAX_SEED
from radixkv.errors import InvalidRequest, shortened

KindT = TypeVar("KindT")

MAX_CHOICES = 8
MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 64
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 300
MAX_LOGPROBS = 20
MAX_REPETITION_PENALTY = 100.0
NO_SEED = -1
"""The seed that stands for none, as in vLLM."""


class _RefusesByName(msgspec.StructMeta):
    """Of a struct whose callers may give what other engines know, which ``msgspec`` calls a ``TypeError``."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:  # noqa: N805  # its instances are classes
        if args:
            raise InvalidRequest(
                f"{cls.__name__} has {len(args)} settings without names; write temperature=0.8, top_p=0.95"
            )
        fields = cls.__struct_fields__
        unknown = {name: settings.pop(name) for name in [*settings] if name not in fields}
        if unknown:
            compat.SAMPLING.refuse(unknown, fields)
        return super().__call__(**settings)


class SamplingParams(msgspec.Struct, metaclass=_RefusesByName, frozen=True, kw_only=True):
    """Sampling settings of one request, validated whenever one is made, also when decoded from the wire.

    A token is chosen from the logits in this order: ``logit_bias``, the ends that ``min_tokens`` forbids,
    repetition, frequency and presence penalty, temperature, ``min_p``, ``top_k``, ``top_p``.

    Settings that only vLLM or SGLang have are accepted with the value that asks for nothing.

    Raises:
        InvalidRequest: naming the field, its value and the range.
        UnsupportedFeature: naming a setting that there is not, and what to use.
    """

    n: int = 1
    """Answers to the prompt. They share its KV; choice ``i`` draws from ``seed + i``."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: to the end of the context."""
    min_tokens: int = 0
    """No answer ends before it has so many tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 or -1 for all."""
    min_p: float = 0.0
    """Sample from tokens that are at least this likely, relative to the likeliest."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the answer has."""
    frequency_penalty: float = 0.0
    """Taken off the logits of tokens once for each time that the answer has them."""
    repetition_penalty: float = 1.0
    """Logits of tokens that prompt or answer has are divided by it if positive, multiplied if negative."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens."""
    seed: int | None = None
    """The same seed, prompt and settings give the same tokens, whoever else is in the batch.
    None: one is drawn; -1 becomes None, as in vLLM."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these strings."""
    stop_token_ids: tuple[int, ...] = ()
    """The answer ends with the first of these tokens."""
    include_stop_str_in_output: bool = False
    """Whether the stop string is part of the text."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token."""
    skip_special_tokens: bool = True
    """Whether the text leaves special tokens out."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside each chosen one, with log-probabilities of the unchanged
    logits; 0 for the chosen one alone, None for nothing."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first; the prompt is then computed whole, cached or not."""

    @property
    def has_penalties(self) -> bool:
        """Whether the choice of a token depends on the tokens before it."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    def __post_init__(self) -> None:
        # The wire gives the declared types; a caller in Python may give anything.
        msgspec.structs.force_setattr(self, "stop", _tuple_of(str, "stop", self.stop))
        msgspec.structs.force_setattr(self, "stop_token_ids", _tuple_of(int, "stop_token_ids", self.stop_token_ids))
        msgspec.structs.force_setattr(self, "logit_bias", _biases(self.logit_bias))
        values = msgspec.structs.asdict(self)
        for name in (*_NUMBERS, *_COUNTS):
            if type(values[name]) not in _OWN:
                values[name] = _plain(values[name])
                msgspec.structs.force_setattr(self, name, values[name])
        if type(values["seed"]) is int and values["seed"] == NO_SEED:
            values["seed"] = None
            msgspec.structs.force_setattr(self, "seed", None)
        for name, (low, high) in _NUMBERS.items():
            _check_number(name, values[name], low, high, takes_low=name not in _ABOVE_LOWEST)
        for name, (least, most, is_optional) in _COUNTS.items():
            _check_count(name, values[name], least, most, is_optional)
        for name in _SWITCHES:
            if not isinstance(values[name], bool):
                raise _out_of_range(name, values[name], "true or false")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _out_of_range("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        self._check_stop()

    def _check_stop(self) -> None:
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


_NUMBERS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, MAX_REPETITION_PENALTY),
}
"""Name: lowest and highest value."""

_ABOVE_LOWEST = ("top_p", "repetition_penalty")
"""Those that must be above the lowest value."""

_COUNTS = {
    "n": (1, MAX_CHOICES, False),
    "max_tokens": (1, (1 << 31) - 1, True),
    "min_tokens": (0, (1 << 31) - 1, False),
    "top_k": (-1, (1 << 31) - 1, False),
    "seed": (0, MAX_SEED, True),
    "logprobs": (0, MAX_LOGPROBS, True),
    "prompt_logprobs": (0, MAX_LOGPROBS, True),
}
"""Name: least and most, and whether it may be None."""

_SWITCHES = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


_OWN = frozenset({int, float, bool, str, NoneType})
"""The types of values that are no number of another library."""


def _plain(value: Any) -> Any:
    """A number of another library, such as numpy's scalars, as Python's own; all else as it is."""
    if type(value) in _OWN:
        return value
    if isinstance(value, Integral):
        return int(value)
    try:
        return float(value) if isinstance(value, Real) else value
    except OverflowError:  # such as of a long fraction
        return math.inf if value > 0 else -math.inf


def _check_number(name: str, value: object, low: float, high: float, *, takes_low: bool = True) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _out_of_range(name, value, "a number")
    if not low <= value <= high or (value == low and not takes_low):  # also catches NaN
        least = f"between {low:g} and" if takes_low else f"above {low:g} and at most"
        raise _out_of_range(name, value, f"{least} {high:g}")


def _check_count(name: str, value: object, least: int, most: int, is_optional: bool) -> None:
    allowed = (int, NoneType) if is_optional else (int,)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise _out_of_range(name, value, "a whole number")
    if value is not None and not least <= value <= most:
        shown = "2**63 - 1" if most == MAX_SEED else most
        raise _out_of_range(name, value, f"between {least} and {shown}")


def _tuple_of(kind: type[KindT], name: str, value: object) -> tuple[KindT, ...]:
    """One value, or a list of them, as a tuple; None for none."""
    if value is None:
        return ()
    values = [_plain(one) for one in (value if isinstance(value, list | tuple) else [value])]
    if not all(type(one) is kind for one in values):
        raise _out_of_range(name, value, f"a list of {kind.__name__}")
    return tuple(values)


def _biases(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _out_of_range("logit_bias", value, "a map of token ids to numbers")
    if len(value) > MAX_LOGIT_BIASES:
        raise InvalidRequest(f"logit_bias has {len(value)} tokens; at most {MAX_LOGIT_BIASES}", param="logit_bias")
    biases: dict[int, float] = {}
    for token, bias in value.items():
        own = token if type(token) is int else _plain(token)
        if type(own) is not int:
            raise _out_of_range("logit_bias", value, "a map of token ids to numbers")
        biases[own] = bias if type(bias) is float else _plain(bias)
        _check_number("logit_bias", biases[own], -100.0, 100.0)
    return biases


def _out_of_range(name: str, value: object, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {shortened(value)}; it must be {allowed}", param=name)
