"""FastAPI with bodies of msgspec, which it reads and documents."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

import jinja2
import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp

from radixkv.frontend.http.body import BodyReader, name_misspelt_fields
from radixkv.frontend.http.response_docs import ERRORS, EVENTS, add_responses

_SCHEMAS = "#/components/schemas/"


class DocumentedApp(FastAPI):
    """FastAPI, with ``/openapi.json`` and the page ``/docs`` made of the structs that ``json_body`` was given.

    Handlers take only the ``Request`` and decode its body themselves. So FastAPI validates nothing, and no error of
    its own repeats input. The page loads nothing else.

    Args:
        body_reader: reads the bodies.
        around_all: middlewares around everything, the rendering of faults included; the first is the outermost.
        settings: of FastAPI.
    """

    def __init__(self, body_reader: BodyReader, *, around_all: Sequence[Middleware] = (), **settings: Any) -> None:
        self.read_body = body_reader.read
        """Reads and parses the body of a request; see ``BodyReader.read``."""
        self._around_all = around_all
        super().__init__(openapi_url="/openapi.json", docs_url=None, redoc_url=None, **settings)
        self.router.route_class = _RequestRoute
        self._bodies: list[type[msgspec.Struct]] = []
        self.add_api_route("/docs", self._render_docs, include_in_schema=False)

    def build_middleware_stack(self) -> ASGIApp:
        """Returns what handles all requests."""
        app = super().build_middleware_stack()
        for middleware in reversed(self._around_all):
            app = middleware.cls(app, *middleware.args, **middleware.kwargs)
        return app

    def json_body(
        self, body: type[msgspec.Struct], refused: Collection[str] = (), **replaced: Any
    ) -> dict[str, Any]:
        """Returns the ``openapi_extra`` of a route with this JSON body.

        Args:
            body: the struct that the handler decodes.
            refused: fields of the struct that this route refuses; the document leaves them out.
            replaced: by field, the type to show instead of the field's own; null is its default.
        """
        self._bodies.append(_documented(body, refused, replaced) if refused or replaced else body)
        schema = {"$ref": f"{_SCHEMAS}{body.__name__}"}
        documented = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
        has_streams = "stream" in body.__struct_fields__
        return documented | ({"responses": {"200": EVENTS[200]}} if has_streams else {})

    def openapi(self) -> dict[str, Any]:
        """Returns the OpenAPI 3.1 document; the first call makes it, in some milliseconds."""
        if self.openapi_schema is None:
            with warnings.catch_warnings():
                # FastAPI gives all methods of a route one operation id, which is replaced below.
                warnings.filterwarnings("ignore", "Duplicate Operation ID")
                document = get_openapi(
                    title=self.title, version=self.version, description=self.description, routes=self.routes
                )
            _, schemas = msgspec.json.schema_components([*self._bodies, *ERRORS], ref_template=_SCHEMAS + "{name}")
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    operation["operationId"] = re.sub(r"\W+", "_", f"{method}{path}").strip("_")
                    names = "parameters" in operation or "model" in _fields(operation, schemas)
                    add_responses(path, method, operation, names_something=names, prefix=_SCHEMAS)
            self.openapi_schema = document | {"components": {"schemas": schemas}}
        return self.openapi_schema

    async def _render_docs(self, request: Request) -> Response:
        templates = jinja2.Environment(loader=jinja2.PackageLoader(__package__, ""), autoescape=True)
        return HTMLResponse(templates.get_template("docs.html").render(self.openapi(), type_name=_type_name))


class _RequestRoute(APIRoute):
    """A route that calls its handler with the request; FastAPI's own way to arguments costs 30 µs a request.

    Misspelt fields of a body that was read are named in the response's header ``X-RadixKV-Unknown-Field``.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the handler."""

        async def answered(request: Request) -> Response:
            return name_misspelt_fields(request, await self.endpoint(request))

        return answered


def _documented(
    body: type[msgspec.Struct], refused: Collection[str], replaced: dict[str, Any]
) -> type[msgspec.Struct]:
    """Returns a struct with the fields that the document shows; for the arguments see ``json_body``."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(body):
        if field.name in refused:
            continue
        if field.name in replaced:
            fields.append((field.name, replaced[field.name], None))
        elif field.required:
            fields.append((field.name, field.type))
        else:
            fields.append((field.name, field.type, field.default))
    return msgspec.defstruct(body.__name__, fields, namespace={"__doc__": body.__doc__}, kw_only=True)


def _fields(operation: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of an operation's body."""
    if "requestBody" not in operation:
        return {}
    reference: str = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields: dict[str, Any] = schemas[reference.removeprefix(_SCHEMAS)]["properties"]
    return fields


def _type_name(schema: dict[str, Any]) -> str:
    """Names the type of a JSON schema in words, without its limits."""
    match schema:
        case {"$ref": str(reference)}:
            return reference.removeprefix(_SCHEMAS)
        case {"anyOf": list(choices)}:
            return " or ".join(map(_type_name, choices))
        case {"type": "array", "items": dict(items)}:
            return f"list of {_type_name(items)}"
    return str(schema.get("type", "any"))
