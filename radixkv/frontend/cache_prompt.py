"""Prompts in the bodies of routes about the cache, and their encoding."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.frontend.chat_text import TextRequest, check_text_request, render_messages
from radixkv.frontend.http.body_decoder import check_messages, check_prompt, check_tools
from radixkv.frontend.prompt_encoding import encode_conversation, encode_prompts, split_prompts
from radixkv.frontend.served_model import ServedModel
from radixkv.settings.limits import check_cache_salt


class CachePromptRequest(TextRequest, kw_only=True):
    """The body of a route about the cached part of one prompt, or of one conversation."""

    prompt: str | list[int] | None = None
    cache_salt: str | None = None


class CachePromptsRequest(TextRequest, kw_only=True):
    """The body of a route about the cached parts of one or several prompts, or of one conversation."""

    prompt: str | list[str | int | Sequence[int]] | None = None
    cache_salt: str | None = None


CACHE_PROMPT_CHECKS = {"prompt": check_prompt, "messages": check_messages, "tools": check_tools}
"""The checks of its long fields, for a ``BodyDecoder``."""


async def encode_prompt(request: CachePromptRequest, served_model: ServedModel, tenant: str) -> bytes:
    """Returns what ``encode_cache_prompts`` does, of the only prompt."""
    (tokens,) = await encode_cache_prompts(request, served_model, tenant)
    return tokens


async def encode_cache_prompts(
    request: CachePromptRequest | CachePromptsRequest, served_model: ServedModel, tenant: str
) -> list[bytes]:
    """Checks the request; returns each prompt's little-endian int32 ids, as a completion or a chat would send them.

    Long texts are encoded in a thread.

    Raises:
        InvalidRequest: a field cannot be served; ``param`` names it.
        ModelNotFound: the request is for another model.
    """
    check_text_request(request, request.prompt, served_model)
    check_cache_salt(request.cache_salt or "")
    adds_special_tokens = request.adds_special_tokens()
    if request.prompt is None:
        text = await render_messages(request, served_model)
        encoded = await encode_conversation(
            text,
            request.cache_salt or "",
            served_model,
            "messages",
            tenant=tenant,
            adds_special_tokens=adds_special_tokens,
        )
        return [encoded.tokens]
    prompts = split_prompts(request.prompt if isinstance(request.prompt, str) else list(request.prompt))
    return await encode_prompts(prompts, served_model, tenant=tenant, adds_special_tokens=adds_special_tokens)
