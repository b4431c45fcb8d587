"""Why no more of a prompt is cached, for programs and for people."""

from __future__ import annotations

from typing import Any

from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import Explained


def explanation(explained: Explained, tokenizer: Tokenizer | None, *, contents: bool) -> dict[str, Any]:
    """The JSON object; fields that say nothing are left out. ``contents``: as they were asked for."""
    shown: dict[str, Any] = {
        "prompt_tokens": explained.n_tokens,
        "cached_tokens": explained.n_cached,
        "reason": explained.reason,
        "text": _sentence(explained, tokenizer, contents),
    }
    if explained.first_difference is not None:
        shown["first_difference"] = {
            "position": explained.first_difference,
            "prompt_token": _token(explained.token, tokenizer),
            "cached_token": _token(explained.cached_token, tokenizer),
        }
    if explained.n_cached_elsewhere is not None:
        shown["cached_elsewhere_tokens"] = explained.n_cached_elsewhere
    return shown


def _token(token: int | None, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    if token is None:
        return None
    return {"id": token, "text": None if tokenizer is None else tokenizer.token_text(token)}


def _sentence(explained: Explained, tokenizer: Tokenizer | None, contents: bool) -> str:
    how_much = f"{explained.n_cached} of {explained.n_tokens} prompt tokens are cached"
    match explained.reason:
        case "whole":
            why = "those are all whole pages of it" if explained.n_cached else "it has no whole page"
        case "differs":
            why = "what is cached goes on with other tokens"
            if not contents:
                why += ", which only a server with --explain-contents tells"
            elif explained.first_difference is not None:
                mine, theirs = _named(explained.token, tokenizer), _named(explained.cached_token, tokenizer)
                why += f": token {explained.first_difference} is {mine} here and {theirs} there"
        case "evicted":
            why = "the next page was cached, and has been evicted since"
        case "other_namespace":
            why = f"another cache_salt has {explained.n_cached_elsewhere} of them, and shares none"
        case _ if contents:
            why = "nothing that was computed before goes on from there"
        case _:
            why = "nothing that was computed before with this cache_salt goes on from there"
    return f"{how_much}; {why}."


def _named(token: int | None, tokenizer: Tokenizer | None) -> str:
    if token is None:
        return "another"
    return str(token) if tokenizer is None else f"{tokenizer.token_text(token)!r} ({token})"
