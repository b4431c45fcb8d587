"""The routes ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixkv.checkpoints.special_tokens import read_tokenizer_config
from radixkv.errors import InvalidRequest
from radixkv.frontend.arrival import tenant_of
from radixkv.frontend.chat import chat_text
from radixkv.frontend.http.body_decoder import BodyDecoder, check_messages, check_tools
from radixkv.frontend.http.disconnect import cancel_on_disconnect
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.served_model import ServedModel
from radixkv.frontend.text_request import TextRequest, check_text_request
from radixkv.settings.compat import Place, refusals
from radixkv.wire.messages import unpack_tokens
from radixkv.wire.request_limits import check_ids

_MAX_INLINE_SIZE = 4096
"""Up to this many characters or tokens, convert on the event loop; a thread converts more."""
MAX_CHARACTERS = 1 << 20
"""Longest text to tokenize; it may be longer than the context."""
MAX_TOKENS = 1 << 18
"""Longest list of tokens to detokenize."""
_PATH_FIELDS = frozenset({"vocab_file", "merges_file", "tokenizer_file", "name_or_path"})
"""Fields that name files of the machine on which the tokenizer was saved."""


class TokenizeRequest(TextRequest, kw_only=True):
    """The body of ``POST /tokenize``."""

    prompt: str | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of ``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


def add_tokenize_routes(app: DocumentedApp, served_model: ServedModel) -> None:
    """Adds the routes ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

    @app.post("/tokenize", openapi_extra=app.json_body(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """The token ids of a prompt or of messages."""
        body = await app.read_body(request, _tokenize.decode, MAX_CHARACTERS)
        return Response(
            await cancel_on_disconnect(request.receive, _tokenized(body, served_model, tenant_of(request))),
            media_type="application/json",
        )

    @app.post("/detokenize", openapi_extra=app.json_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = await app.read_body(request, _detokenize.decode, MAX_TOKENS)
        text = await cancel_on_disconnect(request.receive, _detokenized(body, served_model))
        return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")

    @app.get("/tokenizer_info")
    async def tokenizer_info(request: Request) -> Response:
        """The tokenizer's configuration, with the chat template."""
        return JSONResponse(_tokenizer_info(served_model))


def _check_text(raw: bytes, maximum: int) -> None:
    # JSON has at most six bytes per character: a backslash, a u and four hexadecimal digits.
    if len(raw) > 6 * maximum + 2:
        raise InvalidRequest(f"prompt is longer than {maximum} characters; send it in parts", param="prompt")


def _check_tokens(raw: bytes, maximum: int) -> None:
    if raw.count(b",") >= maximum or raw.count(b"[") > 1:
        raise InvalidRequest(f"tokens must be a list of at most {maximum} token ids", param="tokens")


_tokenize = BodyDecoder(
    TokenizeRequest,
    {"prompt": _check_text, "messages": check_messages, "tools": check_tools},
    refusals(Place.TEXT),
)
_detokenize = BodyDecoder(DetokenizeRequest, {"tokens": _check_tokens}, {})


async def _tokenized(body: TokenizeRequest, served_model: ServedModel, tenant: str) -> bytes:
    served_model = check_text_request(body, body.prompt, served_model)
    text = body.prompt if body.prompt is not None else await chat_text(body.chat(), served_model)
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(
            f"the text is longer than {MAX_CHARACTERS} characters; send it in parts", param="prompt"
        )
    tokenizer, has_names = served_model.require_tokenizer("prompt"), bool(body.return_token_strs)

    def tokenized(encode: Callable[..., bytes]) -> bytes:
        ids = unpack_tokens(encode(text, adds_special_tokens=body.adds_special_tokens(), namespace=tenant))
        fields = {
            "count": len(ids),
            "max_model_len": served_model.max_prompt_and_answer,
            "tokens": ids,
            "token_strs": [tokenizer.token(each, skip_special_tokens=False) for each in ids] if has_names else None,
        }
        return msgspec.json.encode(fields)

    if len(text) <= _MAX_INLINE_SIZE and tokenizer.is_bounded:
        return tokenized(tokenizer.encode_inline)
    return await served_model.one_at_a_time.run(partial(tokenized, tokenizer.encode))


def read_tokenizer_info(folder: Path) -> dict[str, Any]:
    """Returns the fields of ``tokenizer_config.json`` as vLLM shows them: without paths, and with tokens as texts.

    Args:
        folder: the folder of the tokenizer.

    Raises:
        CheckpointError: a file of it cannot be read.
    """
    fields = {name: value for name, value in read_tokenizer_config(folder).items() if name not in _PATH_FIELDS}
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | {name: _plain(value) for name, value in fields.items()}


def _plain(value: Any) -> Any:
    """Returns a value with the texts of the tokens that it describes in their places."""
    match value:
        case {"content": str(text)}:
            return text
        case dict():
            return {name: _plain(one) for name, one in value.items()}
        case list():
            return [_plain(one) for one in value]
    return value


def _tokenizer_info(served_model: ServedModel) -> dict[str, Any]:
    """Returns the fields of vLLM's ``/tokenizer_info``. Raises ``InvalidRequest`` without a tokenizer."""
    tokenizer, template = served_model.tokenizer, served_model.chat_template
    if tokenizer is None:
        raise InvalidRequest("this checkpoint has no tokenizer; start the server with --tokenizer")
    info = dict(served_model.tokenizer_info)
    if info.get("eos_token") is None:  # lm-eval needs one
        ends = (tokenizer.token(one, skip_special_tokens=False) for one in sorted(served_model.eos_token_ids))
        info["eos_token"] = next(ends, None)
    info.pop("chat_template", None)  # perhaps several, or another than that of --chat-template
    return info if template is None else info | {"chat_template": template.source}


async def _detokenized(body: DetokenizeRequest, served_model: ServedModel) -> str:
    served_model.named(body.model)
    tokenizer = served_model.require_tokenizer("tokens")
    check_ids(body.tokens, served_model.vocab_size, "tokens")
    if len(body.tokens) <= _MAX_INLINE_SIZE:
        return tokenizer.decode(body.tokens, skip_special_tokens=False)
    return await served_model.one_at_a_time.run(partial(tokenizer.decode, body.tokens, skip_special_tokens=False))
