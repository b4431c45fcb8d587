"""The sampling parameters of a request: how its tokens are chosen, when its output ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType
from typing import Any, TypeVar

import msgspec

from radixkv.errors import InvalidRequest, shortened
from radixkv.settings.compat import Place, SettingNames, naming
from radixkv.settings.config import MAX_SEED
from radixkv.wire.structured_outputs import StructuredOutputs, parse_structured_outputs

KindT = TypeVar("KindT")

MAX_CHOICES = 64
MAX_TOKENS = (1 << 31) - 1
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 64
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 300
MAX_LOGPROBS = 20
MAX_REPETITION_PENALTY = 100.0
MAX_LENGTH_PENALTY = 10.0
"""Largest absolute value of ``length_penalty``."""
NO_SEED = -1
"""A ``seed`` that means None, as in vLLM."""


_NAMES = SettingNames(Place.SAMPLING, "SamplingParams", InvalidRequest)


class _TakesOtherNames(msgspec.StructMeta):
    """Metaclass that takes and refuses other engines' names; ``msgspec`` alone would raise a ``TypeError``."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:  # noqa: N805  # its instances are classes
        if args:
            raise InvalidRequest(
                f"{cls.__name__} has {len(args)} settings without names; write temperature=0.8, top_p=0.95"
            )
        if settings.keys() <= _FIELDS:
            return super().__call__(**settings)
        resolved, used = _NAMES.resolve(settings, _FIELDS)
        with naming(used):
            return super().__call__(**resolved)


class SamplingParams(msgspec.Struct, metaclass=_TakesOtherNames, frozen=True, kw_only=True):
    """Sampling settings of one request, validated whenever one is made, including when decoded from the wire.

    The logits are processed in this order: ``logit_bias``, the stop tokens that ``min_tokens`` forbids, repetition,
    frequency and presence penalty, temperature, ``min_p``, ``top_k``, ``top_p``.

    Other engines' names of these settings, such as ``max_new_tokens``, are taken. Settings that only other engines
    have are accepted if their value has no effect.

    Raises:
        InvalidRequest: a field is invalid, or given under two names; the text names field, value and range.
        UnsupportedFeature: a setting does not exist; the text names it and what to use instead.
    """

    n: int = 1
    """Number of outputs. They share the KV of the prompt; choice ``i`` is sampled with ``seed + i``."""
    use_beam_search: bool = False
    """Whether the outputs are the ``n`` best that a beam search of width ``n`` finds, the best first, instead of
    samples. ``temperature`` and ``seed`` change nothing then, and other settings of how tokens are chosen, or when
    the output ends, are refused."""
    length_penalty: float = 1.0
    """Exponent of the length in the score of a beam search, which is the sum of an output's logprobs, divided by
    their number to this power. A higher one favours longer outputs."""
    max_tokens: int | None = 16
    """Maximum number of tokens to generate. None: up to the end of the context."""
    min_tokens: int = 0
    """Minimum number of tokens to generate before the output may end."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose total probability reaches this."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 or -1 for all."""
    min_p: float = 0.0
    """Sample from tokens whose probability is at least this fraction of the most likely one's."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occur in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that it occurs in the output."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens that occur in prompt or output."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids."""
    seed: int | None = None
    """The same seed, prompt and settings give the same tokens, whatever else is in the batch. None: a seed is
    drawn. -1 becomes None, as in vLLM."""
    stop: tuple[str, ...] = ()
    """The output ends before the first of these strings."""
    stop_token_ids: tuple[int, ...] = ()
    """The output ends with the first of these tokens."""
    include_stop_str_in_output: bool = False
    """Whether the text includes the stop string."""
    ignore_eos: bool = False
    """Whether generation continues past the end-of-sequence token."""
    skip_special_tokens: bool = True
    """Whether the text leaves special tokens out."""
    logprobs: int | None = None
    """How many of the most likely tokens to report beside each sampled one, with logprobs of the unprocessed
    logits. 0: the sampled token only. None: nothing."""
    prompt_logprobs: int | None = None
    """Like ``logprobs``, for each token of the prompt but the first. The whole prompt is then computed, even if it
    is cached."""
    kv_budget: int | None = None
    """The most tokens whose KV the answer's rows read: pages of the others are dropped, so that the answer is
    approximate. 0: all are read. None: what the server's ``kv_budget`` says, or else all."""
    structured_outputs: StructuredOutputs | None = None
    """What the output must match; also as a mapping. None: anything.

    The grammar wins over other settings. The output ends when nothing may follow, also before ``min_tokens`` and
    with ``ignore_eos``. A token of ``stop_token_ids`` ends it only where the grammar allows that token."""

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty is set, so that the logits depend on the tokens before."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    def __post_init__(self) -> None:
        # msgspec checks types only when decoding; a caller in Python may pass anything.
        msgspec.structs.force_setattr(self, "stop", _tuple_of(str, "stop", self.stop))
        msgspec.structs.force_setattr(self, "stop_token_ids", _tuple_of(int, "stop_token_ids", self.stop_token_ids))
        msgspec.structs.force_setattr(self, "logit_bias", _parse_logit_bias(self.logit_bias))
        wanted = parse_structured_outputs(self.structured_outputs)
        msgspec.structs.force_setattr(self, "structured_outputs", wanted)
        values = msgspec.structs.asdict(self)
        for name in (*_FLOAT_RANGES, *_INTEGER_RANGES):
            if type(values[name]) not in _PYTHON_TYPES:
                values[name] = _to_python_number(values[name])
                msgspec.structs.force_setattr(self, name, values[name])
        if type(values["seed"]) is int and values["seed"] == NO_SEED:
            values["seed"] = None
            msgspec.structs.force_setattr(self, "seed", None)
        for name, (minimum, maximum) in _FLOAT_RANGES.items():
            _check_float(name, values[name], minimum, maximum, includes_minimum=name not in _EXCLUDES_MINIMUM)
        for name, (minimum, maximum, may_be_none) in _INTEGER_RANGES.items():
            _check_integer(name, values[name], minimum, maximum, may_be_none)
        for name in _BOOLEANS:
            if not isinstance(values[name], bool):
                raise _invalid(name, values[name], "true or false")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        self._check_stop()
        self._check_beams()

    def _check_beams(self) -> None:
        if not self.use_beam_search:
            if self.length_penalty != 1.0:
                raise InvalidRequest(
                    f"length_penalty is {self.length_penalty} without use_beam_search; set that to true, or leave "
                    "length_penalty out",
                    param="length_penalty",
                )
            return
        values = msgspec.structs.asdict(self)
        if values["top_k"] == -1:  # all, as 0
            values["top_k"] = 0
        if values["kv_budget"] == 0:  # none, although the server has one
            values["kv_budget"] = None
        for name in _NOT_WITH_BEAMS:
            if values[name] != _DEFAULTS[name]:
                raise InvalidRequest(
                    f"{name} is {shortened(values[name])} with use_beam_search, which takes only n, max_tokens, "
                    "length_penalty and ignore_eos; leave it out, or sample the answers",
                    param=name,
                )

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


@dataclass(frozen=True)
class BeamSearchParams:
    """The settings of ``LLM.beam_search``, under vLLM's names.

    Raises:
        InvalidRequest: a field is invalid; the text names field, value and range.
    """

    beam_width: int
    """Number of beams, and of outputs."""
    max_tokens: int
    """Maximum number of tokens to generate."""
    ignore_eos: bool = False
    """Whether generation continues past the end-of-sequence token."""
    temperature: float = 0.0
    """Changes nothing, as in vLLM: beams are scored by the model's own logprobs."""
    length_penalty: float = 1.0
    """As in ``SamplingParams``."""

    def __post_init__(self) -> None:
        _ = self.sampling

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of a request with these settings."""
        with naming({"n": "beam_width"}):
            return SamplingParams(
                n=self.beam_width,
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                use_beam_search=True,
                length_penalty=self.length_penalty,
                ignore_eos=self.ignore_eos,
            )


_FIELDS = frozenset(SamplingParams.__struct_fields__)

_NOT_WITH_BEAMS = (
    *("min_tokens", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "stop", "stop_token_ids", "logprobs", "prompt_logprobs", "kv_budget", "structured_outputs"),
)
"""Settings that keep their defaults with ``use_beam_search``."""

_FLOAT_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, MAX_REPETITION_PENALTY),
    "length_penalty": (-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
}
"""Name: (minimum, maximum)."""

_EXCLUDES_MINIMUM = ("top_p", "repetition_penalty")
"""Fields that must be greater than their minimum."""

_INTEGER_RANGES = {
    "n": (1, MAX_CHOICES, False),
    "max_tokens": (1, MAX_TOKENS, True),
    "min_tokens": (0, (1 << 31) - 1, False),
    "top_k": (-1, (1 << 31) - 1, False),
    "seed": (0, MAX_SEED, True),
    "logprobs": (0, MAX_LOGPROBS, True),
    "prompt_logprobs": (0, MAX_LOGPROBS, True),
    "kv_budget": (0, MAX_TOKENS, True),
}
"""Name: (minimum, maximum, may be None)."""

_BOOLEANS = ("use_beam_search", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


_PYTHON_TYPES = frozenset({int, float, bool, str, NoneType})
"""Types whose values ``_to_python_number`` returns at once."""


def _to_python_number(value: Any) -> Any:
    """Converts a number of another library, such as a numpy scalar, to int or float; returns other values as they
    are."""
    if type(value) in _PYTHON_TYPES:
        return value
    if isinstance(value, Integral):
        return int(value)
    try:
        return float(value) if isinstance(value, Real) else value
    except OverflowError:  # for example a huge fractions.Fraction
        return math.inf if value > 0 else -math.inf


def _check_float(
    name: str, value: object, minimum: float, maximum: float, *, includes_minimum: bool = True
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _invalid(name, value, "a number")
    if not minimum <= value <= maximum or (value == minimum and not includes_minimum):  # also catches NaN
        lower = f"between {minimum:g} and" if includes_minimum else f"above {minimum:g} and at most"
        raise _invalid(name, value, f"{lower} {maximum:g}")


def _check_integer(name: str, value: object, minimum: int, maximum: int, may_be_none: bool) -> None:
    allowed = (int, NoneType) if may_be_none else (int,)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise _invalid(name, value, "a whole number")
    if value is not None and not minimum <= value <= maximum:
        shown = "2**63 - 1" if maximum == MAX_SEED else maximum
        raise _invalid(name, value, f"between {minimum} and {shown}")


def _tuple_of(kind: type[KindT], name: str, value: object) -> tuple[KindT, ...]:
    """Returns one value, or a list of values, as a tuple; None gives an empty one."""
    if value is None:
        return ()
    values = [_to_python_number(one) for one in (value if isinstance(value, list | tuple) else [value])]
    if not all(type(one) is kind for one in values):
        raise _invalid(name, value, f"a list of {kind.__name__}")
    return tuple(values)


def _parse_logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _invalid("logit_bias", value, "a map of token ids to numbers")
    if len(value) > MAX_LOGIT_BIASES:
        raise InvalidRequest(f"logit_bias has {len(value)} tokens; at most {MAX_LOGIT_BIASES}", param="logit_bias")
    biases: dict[int, float] = {}
    for token, bias in value.items():
        token_id = token if type(token) is int else _to_python_number(token)
        if type(token_id) is not int:
            raise _invalid("logit_bias", value, "a map of token ids to numbers")
        biases[token_id] = bias if type(bias) is float else _to_python_number(bias)
        _check_float("logit_bias", biases[token_id], -100.0, 100.0)
    return biases


def _invalid(name: str, value: object, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {shortened(value)}; it must be {allowed}", param=name)


_DEFAULTS = msgspec.structs.asdict(SamplingParams())
