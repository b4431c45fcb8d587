"""Speculative decoding under SGLang's names, which has one for each field of ``speculative_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixkv.errors import ConfigError, shortened
from radixkv.settings.checks import check_at_least
from radixkv.settings.speculative import MAX_DRAFTS, SpeculativeConfig, as_speculative

ALGORITHM, NUM_DRAFT_TOKENS = "speculative_algorithm", "speculative_num_draft_tokens"
FIELDS = {
    ALGORITHM: "method",
    NUM_DRAFT_TOKENS: "num_speculative_tokens",
    "speculative_ngram_min_match_window_size": "prompt_lookup_min",
    "speculative_ngram_max_match_window_size": "prompt_lookup_max",
}
"""By SGLang's name: the field of ``speculative_config``."""
TWO_SPECULATIONS = f"{ALGORITHM} and speculative_config are the same setting; give one of them"


def speculation_of(given: Mapping[str, Any]) -> SpeculativeConfig | None:
    """Returns what values under SGLang's names ask for; other names are ignored. None: nothing.

    SGLang's ``NGRAM`` looks for guesses in the answers of all requests, so it is ``tree``. It counts the token
    before the guesses as one of them.

    Raises:
        ConfigError: another algorithm, a wrong value, or no algorithm.
    """
    values = {name: given[name] for name in FIELDS if given.get(name) is not None}
    if not values:
        return None
    algorithm = values.pop(ALGORITHM, None)
    if algorithm is None:
        raise ConfigError(f"{min(values)} needs an algorithm; add speculative_algorithm NGRAM")
    if str(algorithm).upper() != "NGRAM":
        raise ConfigError(
            f"speculative_algorithm {shortened(algorithm)} needs a model for drafts, which this release has not; "
            "use NGRAM"
        )
    if (n_tokens := values.get(NUM_DRAFT_TOKENS)) is not None:
        check_at_least(2, NUM_DRAFT_TOKENS, n_tokens, MAX_DRAFTS + 1)
        values[NUM_DRAFT_TOKENS] = n_tokens - 1
    try:
        return as_speculative({"method": "tree", **{FIELDS[name]: value for name, value in values.items()}})
    except ConfigError as error:
        message = str(error)
        for theirs, ours in FIELDS.items():
            message = message.replace(ours, theirs)
        raise ConfigError(message) from None
