"""Routes that load and unload adapters, as vLLM's and SGLang's clients send them."""

from __future__ import annotations

from collections.abc import Awaitable

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from radixkv.errors import RequestError
from radixkv.frontend.adapter_loads import AdapterLoads
from radixkv.frontend.http.body_decoder import BodyDecoder
from radixkv.frontend.http.errors import error_body, status_of
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.settings.compat import Place, refusals


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """The body of ``POST /v1/load_lora_adapter``."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    """Whether it may replace the adapter of this name."""


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """The body of ``POST /v1/unload_lora_adapter``."""

    lora_name: str


def add_adapter_routes(app: DocumentedApp, loads: AdapterLoads) -> None:
    """Adds the routes ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, and SGLang's without ``/v1``."""

    @app.post("/v1/load_lora_adapter", openapi_extra=app.json_body(LoadAdapterRequest))
    async def load(request: Request) -> Response:
        """Loads an adapter, which is a model of its own then."""
        name = await _load(request)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/load_lora_adapter", openapi_extra=app.json_body(LoadAdapterRequest))
    async def load_for_sglang(request: Request) -> Response:
        """Loads an adapter; SGLang's name."""
        return await _answer(request, _load(request))

    @app.post("/v1/unload_lora_adapter", openapi_extra=app.json_body(UnloadAdapterRequest))
    async def unload(request: Request) -> Response:
        """Unloads an adapter; its requests that run end well."""
        name = await _unload(request)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    @app.post("/unload_lora_adapter", openapi_extra=app.json_body(UnloadAdapterRequest))
    async def unload_for_sglang(request: Request) -> Response:
        """Unloads an adapter; SGLang's name."""
        return await _answer(request, _unload(request))

    async def _answer(request: Request, change: Awaitable[str]) -> Response:
        """Returns SGLang's answer; that of an error has what its clients read beside the server's own ``error``."""
        try:
            await change
        except RequestError as error:
            body = {"success": False, "error_message": str(error), "loaded_adapters": loads.paths}
            return JSONResponse(error_body(error, request.url.path) | body, status_of(error))
        return JSONResponse({"success": True, "error_message": "", "loaded_adapters": loads.paths})

    async def _load(request: Request) -> str:
        body = await app.read_body(request, _load_body.decode, 0)
        await loads.load(body.lora_name, body.lora_path, in_place=bool(body.load_inplace))
        return body.lora_name

    async def _unload(request: Request) -> str:
        body = await app.read_body(request, _unload_body.decode, 0)
        await loads.unload(body.lora_name)
        return body.lora_name


_load_body = BodyDecoder(LoadAdapterRequest, {}, refusals(Place.LOAD_ADAPTER))
_unload_body = BodyDecoder(UnloadAdapterRequest, {}, {})
