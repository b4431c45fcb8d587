"""What users see of cache misses, as JSON and in words."""

from __future__ import annotations

from typing import Any

import msgspec

from radixkv.frontend.miss_counts import MissCounts, MissesAtPlace
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.messages import CacheMiss, ComputedPrompt, Done, Ready, unpack_tokens

_MAX_CHARACTERS = 40
"""Most characters of each text around a first difference."""


def without_contents(done: Done) -> Done:
    """Returns a request's end without what tells a client more than whole pages of its own salt."""
    miss = done.miss
    if miss is not None:
        reason = "never_seen" if miss.reason in ("other_namespace", "invocation") else miss.reason
        miss = CacheMiss(reason, miss.n_matched, miss.place, is_new=miss.is_new)
    return msgspec.structs.replace(done, cache_use=done.cache_use.in_whole_pages, miss=miss, drafts=None)


def without_copies(computed: ComputedPrompt) -> ComputedPrompt:
    """Returns what the cache gave and got of a prompt without what was copied from a part of a page."""
    return msgspec.structs.replace(computed, cache_use=computed.cache_use.in_whole_pages)


def miss_fields(miss: CacheMiss, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns the JSON object of one miss, without fields that do not apply."""
    fields: dict[str, Any] = {"reason": miss.reason, "matched_tokens": miss.n_matched}
    if miss.first_difference is not None:
        fields["first_difference"] = {"position": miss.first_difference}
        if tokenizer is not None:
            fields["first_difference"] |= {
                "after": _text(miss.common, tokenizer)[-_MAX_CHARACTERS:],
                "prompt": _text(miss.prompt, tokenizer)[:_MAX_CHARACTERS],
                "cached": _text(miss.cached, tokenizer)[:_MAX_CHARACTERS],
            }
    if miss.n_elsewhere is not None:
        fields["cached_elsewhere_tokens"] = miss.n_elsewhere
    if miss.is_other_adapter:
        fields["is_other_adapter"] = True
    return fields


def cached_fields(
    use: CacheUse, miss: CacheMiss | None, ready: Ready, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Returns what responses say of the cache, under SGLang's names: how many tokens came from it, and from where.

    Args:
        use: of all prompts of the response.
        miss: the miss to report; None for none.
        ready: says which tiers the server has.
        tokenizer: gives the texts of the miss; None for positions only.
    """
    fields: dict[str, Any] = {"cached_tokens": use.n_cached}
    if ready.n_host_slots is not None:
        fields["cached_tokens_details"] = use.by_source(has_disk=ready.has_disk)
    return fields if miss is None else fields | {"cache_miss": miss_fields(miss, tokenizer)}


def place_text(place: MissesAtPlace, counts: MissCounts, tokenizer: Tokenizer | None) -> str:
    """Returns what was lost at a place, and why, in words."""
    share = f"{place.n_lost / counts.n_lost:.0%}" if counts.n_lost else "none"
    of_requests = f"{place.n_requests:,} request{'s' if place.n_requests > 1 else ''}"
    who = f"{share} of computed tokens, of {of_requests},"
    match place.reason:
        case "differs":
            what = f"{who} {_where(place.example, tokenizer)}"
        case "evicted":
            what = f"{who} were cached and have been evicted"
        case "other_namespace" if place.example.is_other_adapter:
            what = f"{who} are cached with another adapter, or without one, whose KV differs"
        case "other_namespace":
            what = f"{who} are cached under another cache_salt, which is not shared"
        case "invocation" if place.example.is_other_adapter:
            what = f"{who} follow a page that is cached with another adapter, or without one, whose KV differs"
        case "invocation":
            what = f"{who} follow an invocation of an activated LoRA, which stands elsewhere in what is cached"
        case "no_state":
            what = f"{who} follow the nearest state of the model's recurrent layers or windows"
        case "not_read":
            what = f"{who} are not looked up, as the requests ask"
        case "evicted_or_never_seen" if place.has_place:
            what = f"{who} {_where(place.example, tokenizer)}, unless they were evicted long ago"
        case "evicted_or_never_seen":
            what = f"{who} are new, or were evicted too long ago to be remembered"
        case _:
            what = f"{who} are new: no earlier request continued there"
    return f"{what}; {place.n_lost // place.n_requests:,} tokens a request"


def worst_miss(counts: MissCounts, tokenizer: Tokenizer | None, *, min_share: float, min_tokens: int) -> str | None:
    """Returns a line about the worst avoidable misses; None if there are none above these bounds.

    Args:
        counts: the misses.
        tokenizer: gives the texts of tokens; None for positions only.
        min_share: the least share of lost tokens that is worth a line.
        min_tokens: the fewest lost tokens that are worth a line.
    """
    for place in counts.places():
        is_avoidable = place.has_place or place.reason in ("evicted", "other_namespace")
        is_avoidable = is_avoidable and not place.example.is_other_adapter and place.n_requests > 1
        if is_avoidable and place.n_lost >= max(min_tokens, min_share * counts.n_lost):
            return place_text(place, counts, tokenizer)
    return None


def _where(miss: CacheMiss, tokenizer: Tokenizer | None) -> str:
    if miss.first_difference is None:
        return f"follow the page after token {miss.n_matched}, where the cache has other tokens"
    if tokenizer is None:
        return f"follow token {miss.first_difference}, where the prompts differ"
    after = _text(miss.common, tokenizer)[-_MAX_CHARACTERS:]
    behind = f" after {after!r}" if after else ""
    return f"follow token {miss.first_difference}, where the prompts differ{behind}"


def _text(tokens: bytes, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(unpack_tokens(tokens), skip_special_tokens=False)
