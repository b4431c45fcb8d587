"""The route ``/cache/match``: what each tier has of some prompts, and the load, for routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixkv.errors import InvalidRequest
from radixkv.frontend.arrival import tenant_of
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.body_decoder import BodyDecoder
from radixkv.frontend.http.disconnect import cancel_on_disconnect
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.served_model import ServedModel
from radixkv.frontend.text_request import CACHE_PROMPT_CHECKS, CachePromptsRequest, encode_cache_prompts
from radixkv.settings.compat import Place, refusals
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.cache_messages import Matched, TierMatch
from radixkv.wire.messages import Ready
from radixkv.wire.request_limits import MAX_MATCHED_TOKENS


def add_match_route(app: DocumentedApp, client: EngineClient, served_model: ServedModel) -> None:
    """Adds the route ``/cache/match``."""

    @app.post("/cache/match", openapi_extra=app.json_body(CachePromptsRequest))
    async def match(request: Request) -> Response:
        """What each tier has of one or several prompts, and the load; changes nothing."""
        tenant = tenant_of(request)
        body = await app.read_body(request, _match.decode, served_model.max_prompt_and_answer)
        prompts = await cancel_on_disconnect(request.receive, encode_cache_prompts(body, served_model, tenant))
        _check_total(prompts)
        namespace = served_model.named(body.model).namespace(tenant, body.cache_salt)
        matched = await client.match(prompts, namespace)
        return JSONResponse(_report(matched, served_model.ready))


def _check_total(prompts: Sequence[bytes]) -> None:
    n_tokens = sum(map(len, prompts)) // TOKEN_BYTES
    if len(prompts) > 1 and n_tokens > MAX_MATCHED_TOKENS:
        raise InvalidRequest(
            f"the prompts have {n_tokens} tokens together; at most {MAX_MATCHED_TOKENS}, or one prompt a request",
            param="prompt",
        )


def _report(matched: Matched, ready: Ready) -> dict[str, Any]:
    load = {
        "running": matched.n_running,
        "waiting": matched.n_waiting,
        "max_running": ready.max_num_seqs,
        "pages": ready.n_pages,
        "pages_free": matched.n_pages_free,
        "pages_evictable": matched.n_pages_evictable,
    }
    return {
        "page_size": ready.page_size,
        "prompts": [_prompt_fields(prompt, ready) for prompt in matched.prompts],
        "load": {name: count for name, count in load.items() if count is not None},
    }


def _prompt_fields(prompt: TierMatch, ready: Ready) -> dict[str, Any]:
    tiers = {"device": prompt.n_on_device}
    if ready.n_host_slots is not None:
        tiers["host"] = prompt.n_in_host
    if ready.has_disk:
        tiers["storage"] = prompt.n_on_disk
    return {"prompt_tokens": prompt.n_tokens, "matched_tokens": tiers}


_match = BodyDecoder(CachePromptsRequest, CACHE_PROMPT_CHECKS, refusals(Place.TEXT), ids_field="prompt")
