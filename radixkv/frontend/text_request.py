"""Bodies that give a prompt or messages for their tokens alone, of the routes about text and cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from radixkv.errors import InvalidRequest
from radixkv.frontend.chat import Chat, prompt_tokens
from radixkv.frontend.http.body_decoder import Messages, check_messages, check_prompt, check_tools
from radixkv.frontend.prompt_encoding import PromptEncoder, split_prompts
from radixkv.frontend.served_model import ServedModel
from radixkv.wire.request_limits import check_cache_salt


class TextRequest(msgspec.Struct, kw_only=True):
    """Base of request bodies that give either a prompt or chat messages."""

    model: str | None = None
    messages: Messages | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: Annotated[
        bool | None,
        msgspec.Meta(
            description="Whether the tokenizer adds special tokens; default: to a prompt, not to rendered messages."
        ),
    ] = None

    def adds_generation_prompt(self) -> bool:
        """Returns ``add_generation_prompt`` or its default."""
        return self.add_generation_prompt is not False

    def adds_special_tokens(self) -> bool:
        """Returns ``add_special_tokens`` or its default."""
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens

    def chat(self, cache_salt: str | None = None) -> Chat:
        """Returns the messages as a conversation, with the salt of the request if it has one."""
        return Chat(
            messages=self.messages or [],
            tools=self.tools or (),
            add_generation_prompt=self.adds_generation_prompt(),
            continue_final_message=bool(self.continue_final_message),
            variables=self.chat_template_kwargs,
            adds_special_tokens=self.adds_special_tokens(),
            cache_salt=cache_salt or "",
        )


def check_text_request(request: TextRequest, prompt: object, served_model: ServedModel) -> ServedModel:
    """Checks the fields that all ``TextRequest`` bodies share; returns the model that the request names.

    Args:
        request: the body.
        prompt: its prompt, if it gives one.
        served_model: the model that it may name, perhaps with an adapter.

    Raises:
        InvalidRequest: the body gives neither a prompt nor messages, or both.
        ModelNotFound: it names another model.
    """
    model = served_model.named(request.model)
    if (prompt is None) == (request.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    return model


class CachePromptRequest(TextRequest, kw_only=True):
    """The body of a route about the cached part of one prompt, or of one conversation."""

    prompt: str | list[int] | None = None
    cache_salt: str | None = None


class CachePromptsRequest(TextRequest, kw_only=True):
    """The body of a route about the cached parts of one or several prompts, or of one conversation."""

    prompt: str | list[str | int | Sequence[int]] | None = None
    cache_salt: str | None = None


CACHE_PROMPT_CHECKS = {"prompt": check_prompt, "messages": check_messages, "tools": check_tools}
"""Checks of the long fields of these bodies, for a ``BodyDecoder``."""


async def encode_prompt(request: CachePromptRequest, served_model: ServedModel, tenant: str) -> bytes:
    """Returns the tokens of the only prompt; see ``encode_cache_prompts``."""
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
    served_model = check_text_request(request, request.prompt, served_model)
    check_cache_salt(request.cache_salt or "")
    if request.prompt is None:
        return [await prompt_tokens(request.chat(request.cache_salt), served_model, tenant)]
    prompts = split_prompts(request.prompt if isinstance(request.prompt, str) else list(request.prompt))
    encoder = PromptEncoder(
        served_model=served_model, tenant=tenant, adds_special_tokens=request.adds_special_tokens()
    )
    return await encoder.prompts(prompts)
