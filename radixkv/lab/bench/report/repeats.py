"""Prompt tokens that were in earlier prompts, wherever they stood there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

WINDOW = 16
"""Shortest run of tokens that counts as repeated: a page of the engine's default size."""
_TOKEN_BYTES = 4


def repeated_tokens(prompts: Sequence[Sequence[int]], n_cached: Sequence[int]) -> list[int]:
    """Returns for each prompt the tokens that a cache would find if it could reuse KV behind any other tokens.

    A token counts if it is in a run of ``WINDOW`` tokens that an earlier prompt has too, at any position, or in the
    prefix that an infinite prefix cache finds. As there, at least one token of each prompt is computed. Such a
    cache is hypothetical: KV depends on all tokens before it, so that reusing it behind others changes answers,
    unless a part of it is computed again.

    Cost: O(tokens), and memory for each distinct run of all prompts.

    Args:
        prompts: token ids, in the order in which they were sent.
        n_cached: leading tokens of each prompt that an infinite prefix cache has.
    """
    seen: set[bytes] = set()
    counts: list[int] = []
    for prompt, n_prefix in zip(prompts, n_cached, strict=True):
        ids = array("i", prompt).tobytes()
        windows = [
            ids[start * _TOKEN_BYTES : (start + WINDOW) * _TOKEN_BYTES] for start in range(len(prompt) - WINDOW + 1)
        ]
        n_found = end = n_prefix
        for start, window in enumerate(windows):
            if window in seen and start + WINDOW > end:
                n_found += start + WINDOW - max(start, end)
                end = start + WINDOW
        seen.update(windows)
        counts.append(max(min(n_found, len(prompt) - 1), 0))
    return counts
