"""The Ray Serve application: ``serve run radixkv.ray_serve.application:build flags="--model tiny"``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from radixkv.ray_serve.ingress import Ingress
from radixkv.ray_serve.request_router import PROBE_TIMEOUT_S, MatchRouter
from radixkv.ray_serve.server import Server
from radixkv.ray_serve.server_gpus import gpus_of_ranks
from radixkv.settings.server_config import ServerConfig

REFUSED_FLAGS = ("--host", "--port", "--api-key", "--api-key-file", "--tenants", "--allowed-origins")
"""Flags of ``radixkv serve`` that each replica sets itself, or that have no place behind an ingress.

``--tenants`` is one: the request router has no tenant's key, so it would ask about the cache of another one."""


class Arguments(BaseModel):
    """The arguments of the application."""

    model_config = ConfigDict(extra="forbid")

    flags: list[str] = Field(default_factory=list)
    """Flags of ``radixkv serve`` for each server; a text is split as a shell does."""
    api_key_file: str | None = None
    """File, on every node, with the key that clients must send; None: no key, and only clients of this machine."""
    max_body_bytes: int = Field(default=ServerConfig.max_body_bytes, ge=1)
    """The longest body of a request."""
    probe_timeout_s: float = Field(default=PROBE_TIMEOUT_S, gt=0)
    """A server that takes longer to say what it has of a prompt gets it only if no other one takes it."""

    @field_validator("flags", mode="before")
    @classmethod
    def _split(cls, flags: object) -> object:
        return shlex.split(flags) if isinstance(flags, str) else flags

    @field_validator("flags")
    @classmethod
    def _check(cls, flags: list[str]) -> list[str]:
        for flag in flags:
            if flag.partition("=")[0] in REFUSED_FLAGS:
                raise ValueError(f"{flag} is not for servers behind Ray Serve; leave it out, or give api_key_file")
        return flags

    @field_validator("api_key_file")
    @classmethod
    def _check_key(cls, file: str | None) -> str | None:
        if file is not None and not Path(file).is_file():
            raise ValueError(f"api_key_file {file} is not a file; give one that every node has")
        return file


def build(args: dict[str, Any]) -> Application:
    """Returns the application: an ingress, and the servers behind it.

    Number of replicas, autoscaling and resources are those of the deployments ``Server`` and ``Ingress`` in Serve's
    configuration file; see deploy/ray/serve.yaml. Without resources there, a server with ranks asks for a GPU for
    each, which Ray takes from one node.

    Args:
        args: the fields of ``Arguments``.

    Raises:
        ConfigError: see ``gpus_of_ranks``.
        ValidationError: a field is unknown or has a wrong value.
    """
    arguments = Arguments.model_validate(args)
    router = RequestRouterConfig(
        request_router_class=MatchRouter, request_router_kwargs={"probe_timeout_s": arguments.probe_timeout_s}
    )
    n_gpus = gpus_of_ranks(arguments.flags)
    servers = serve.deployment(
        Server,
        name="Server",
        request_router_config=router,
        ray_actor_options={"num_gpus": n_gpus} if n_gpus else None,
        max_ongoing_requests=512,
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=60,
    ).bind(arguments.flags, arguments.api_key_file)
    return serve.deployment(Ingress, name="Ingress", max_ongoing_requests=4096).bind(
        servers, has_key=arguments.api_key_file is not None, max_body_bytes=arguments.max_body_bytes
    )
