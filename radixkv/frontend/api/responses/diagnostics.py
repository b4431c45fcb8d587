"""OpenAI's prompt cache diagnostics: what of a request is compared, and the fields of the response."""

from __future__ import annotations

from typing import Any

from radixkv.frontend.answers import SingleAnswer
from radixkv.frontend.api.responses.schema import ResponsesRequest, TextFormat
from radixkv.frontend.cache_diagnostics.comparison import INVOCATION, MESSAGES, Verdict
from radixkv.frontend.cache_diagnostics.fingerprint import Fingerprint
from radixkv.frontend.chat import Chat
from radixkv.frontend.served_model import ServedModel
from radixkv.frontend.shared_fields import PromptCacheOptions

_DEFAULT_TIER, _DEFAULT_VERBOSITY = "auto", "medium"


def response_id(answer: SingleAnswer) -> str:
    """Returns the id of the response with this answer."""
    return f"resp_{answer.id}"


def response_fingerprint(
    request: ResponsesRequest, chat: Chat, answer: SingleAnswer, served_model: ServedModel
) -> Fingerprint:
    """Returns what a later response can be compared with. Costs what ``Fingerprint.of`` does."""
    text = request.text
    return Fingerprint.of(
        cache_salt=chat.cache_salt,
        adapter=served_model.first_adapter,
        parts={
            "model": served_model.adapter,  # names of equal bytes share pages
            "prompt_cache_key": request.prompt_cache_key,
            "service_tier": request.service_tier or _DEFAULT_TIER,
            "tools": chat.tools,
            "text_format": (text and text.format) or TextFormat("text"),
            "reasoning_effort": request.reasoning and request.reasoning.effort,
            "verbosity": (text and text.verbosity) or _DEFAULT_VERBOSITY,
        },
        messages=served_model.without_nonces(chat.messages),
        key=served_model.key(answer.prompt.tokens),
        page_size=served_model.ready.page_size,
    )


def diagnostics_field(verdict: Verdict | None) -> dict[str, Any] | None:
    """Returns ``prompt_cache_diagnostics``."""
    if verdict is None:
        return None
    match verdict.outcome:
        case "same":
            return {"type": "cache_hit"}
        case "changed":
            return {
                "type": "cache_miss",
                "reason": "input_changed" if verdict.part in (MESSAGES, INVOCATION) else f"{verdict.part}_changed",
                "cache_missed_tokens": verdict.n_missed,
                "comparison_reusable_tokens": verdict.n_reusable,
            }
        case "not_found":
            return {"type": "comparison_response_not_found"}
        case "unavailable":
            return {"type": "unavailable"}


def applied_options(options: PromptCacheOptions | None) -> dict[str, Any] | None:
    """Returns the response's ``prompt_cache_options``; None if the request has none."""
    if options is None:
        return None
    applied: dict[str, Any] = {"mode": options.mode or "implicit", "ttl": options.ttl_or_default}
    if options.comparison_response_id is not None:
        applied["comparison_response_id"] = options.comparison_response_id
    return applied
