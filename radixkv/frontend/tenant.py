"""The tenant that sends an HTTP request, as the check of its key has found it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Scope

_TENANT = "tenant"


def set_tenant(scope: Scope, name: str) -> None:
    """Notes the tenant of a request."""
    scope.setdefault("state", {})[_TENANT] = name


def tenant_of(request: Request) -> str:
    """Returns the name of a request's tenant; ``tenants.OPERATOR`` on a server without tenants."""
    name: str = request.scope.get("state", {}).get(_TENANT, "")
    return name
