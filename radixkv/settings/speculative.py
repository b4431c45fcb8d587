"""The settings of speculative decoding, which a flag takes as JSON and ``LLM`` as a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import count, takewhile
from typing import Any, cast

import msgspec

from radixkv.errors import ConfigError, shortened
from radixkv.settings.checks import check_at_least

MAX_DRAFTS = 32
"""Most drafts of a row; few texts repeat themselves for longer than is gained then."""
MAX_LOOKUP = 64
DEFAULT_DRAFTS = {"tree": 16, "ngram": 8}
"""By method: drafts of a row, unless their number is given."""
_USE = "use tree (cached sequences, recent answers and the request's own text), or ngram (its own text)"
_NEEDS = {
    "a draft head": ("eagle", "eagle3", "medusa", "mtp", "mlp_speculator", "deepseek_mtp", "dflash"),
    "a second model": ("draft_model", "standalone"),
    "suffix trees": ("suffix",),
    "drafts on the GPU": ("ngram_gpu",),
}
"""By what this release has not: the methods that need it."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are guessed before they are sampled, under vLLM's names."""

    method: str = "ngram"
    """Where guesses come from: ``ngram`` is the request's own prompt and answer; ``tree`` is also the cache and
    what was answered lately."""
    num_speculative_tokens: int = cast("int", None)
    """Most guesses that a step checks for a request; None takes that of ``DEFAULT_DRAFTS``."""
    prompt_lookup_max: int = 8
    """Length of the longest ending that is looked for in the text before it."""
    prompt_lookup_min: int = 2
    """Length of the shortest ending."""

    @property
    def lookup_sizes(self) -> tuple[int, ...]:
        """The lengths of endings that are looked for: from the shortest on doubled, and the longest."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        return *takewhile(lambda size: size < high, (low << n for n in count())), high

    def __str__(self) -> str:
        """Returns the JSON that a flag takes."""
        return msgspec.json.encode(self).decode()

    def __post_init__(self) -> None:
        if self.method not in tuple(DEFAULT_DRAFTS):
            needed = next((what for what, methods in _NEEDS.items() if self.method in methods), None)
            why = "there is no such method" if needed is None else f"this release has no method with {needed}"
            raise ConfigError(f"method {shortened(self.method)}: {why}; {_USE}")
        if cast("int | None", self.num_speculative_tokens) is None:
            object.__setattr__(self, "num_speculative_tokens", DEFAULT_DRAFTS[self.method])
        check_at_least(1, "num_speculative_tokens", self.num_speculative_tokens, MAX_DRAFTS)
        check_at_least(1, "prompt_lookup_min", self.prompt_lookup_min, MAX_LOOKUP)
        check_at_least(1, "prompt_lookup_max", self.prompt_lookup_max, MAX_LOOKUP)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min {self.prompt_lookup_min} is above prompt_lookup_max {self.prompt_lookup_max}"
            )


DEFAULT_SPECULATION = SpeculativeConfig("tree")
"""What is guessed unless another configuration is given. A given one is another object, also where it is equal."""


def as_speculative(value: object) -> SpeculativeConfig | None:
    """Returns the configuration that a mapping or its JSON gives; None for ``off``, which guesses nothing.

    Raises:
        ConfigError: it is neither, or has a wrong field.
    """
    if isinstance(value, SpeculativeConfig):
        return value
    if value is None or value in ("off", "null"):
        return None
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeError):
            raise ConfigError(f"{shortened(value)} is neither a JSON object nor off") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{shortened(value)} is no mapping; give one such as {{'method': 'tree'}}")
    if "method" not in value:
        raise ConfigError('speculative_config has no method; add "method": "tree"')
    known = {one.name for one in fields(SpeculativeConfig)}
    if unknown := {str(name) for name in value} - known:
        raise ConfigError(
            f"{shortened(min(unknown))} is no field of speculative_config; there are {', '.join(sorted(known))}"
        )
    given = dict(value)
    low, high = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    if isinstance(low, int) and high is None:  # the one that is not given gives way
        given["prompt_lookup_max"] = max(low, SpeculativeConfig.prompt_lookup_max)
    elif isinstance(high, int) and low is None:
        given["prompt_lookup_min"] = min(high, SpeculativeConfig.prompt_lookup_min)
    return SpeculativeConfig(**given)
