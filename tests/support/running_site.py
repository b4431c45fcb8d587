"""The app in front of a scripted runtime, on real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop
from starlette.types import ASGIApp

from radixkv.frontend.adapter_loads import AdapterLoads
from radixkv.frontend.api.server_info import public_settings
from radixkv.frontend.app import build_app
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.body import BODY_TIMEOUT_S, BodyReader
from radixkv.frontend.http.connection import Connection
from radixkv.frontend.metrics.prometheus import Metrics
from radixkv.frontend.process import Uvicorn, open_listener
from radixkv.frontend.runtime_client import MAX_PENDING_BYTES, RuntimeClient
from radixkv.frontend.served_model import ServedModel
from radixkv.runtime.process import RuntimeServer, open_socket
from radixkv.settings.config import EngineConfig
from radixkv.settings.server_config import ServerConfig
from support.live import KEEPALIVE_S, LIMIT_S
from support.scripted_runtime import ScriptedLoop, Site


def make_app(
    client: EngineClient,
    served_model: ServedModel,
    server: ServerConfig | None = None,
    metrics: Metrics | None = None,
    body_limit_s: float = BODY_TIMEOUT_S,
) -> ASGIApp:
    """Returns the app with the settings of the server and the default ones of the engine."""
    server = server or ServerConfig()
    return build_app(
        client,
        served_model,
        AdapterLoads(client.runtimes, served_model, folder=None, are_served=False),
        metrics or Metrics(),
        BodyReader(100_000, body_limit_s),
        api_key=server.api_key,
        tenant_keys=server.tenants.names,
        allowed_origins=server.allowed_origins,
        metrics_compat=server.metrics_compat,
        explain_contents=server.may_explain_contents,
        settings=public_settings(EngineConfig(), server),
    )


@contextmanager
def running_site(
    served_model: ServedModel,
    folder: Path,
    server: ServerConfig | None = None,
    connection: type[Connection] = Connection,
    body_limit_s: float = BODY_TIMEOUT_S,
    max_pending_bytes: int = MAX_PENDING_BYTES,
) -> Iterator[Site]:
    """Runs a site in its own threads until the end of the context."""
    scripted = ScriptedLoop()
    started: Future[tuple[RuntimeClient, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    path = folder / "runtime.sock"

    def serve_runtime() -> None:
        with open_socket(path) as socket:
            RuntimeServer(socket, scripted).run()

    async def serve_http() -> None:
        metrics, stop = Metrics(), asyncio.Event()
        client = RuntimeClient(metrics, max_pending_bytes=max_pending_bytes)
        await client.connect(str(path))
        await client.handshake()
        app = make_app(client, served_model, server, metrics, body_limit_s)
        config = uvicorn.Config(app, http=connection, ws="none", lifespan="off", log_config=None, log_level="error")
        http = Uvicorn(config)
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        started.set_result((client, asyncio.get_running_loop(), stop))
        await stop.wait()
        client.drain()
        http.should_exit = True
        await serving
        await client.close()

    def run_http() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the server does
            runner.run(serve_http())

    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        threads = [threading.Thread(target=serve_runtime), threading.Thread(target=run_http)]
        for thread in threads:
            thread.start()
        client, events, stop = started.result(timeout=LIMIT_S)
        try:
            limits = httpx.Limits(keepalive_expiry=KEEPALIVE_S)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S, limits=limits) as http:
                yield Site(http, port, scripted, client, events)
        finally:  # also after a failed test, because the threads would keep the process alive
            events.call_soon_threadsafe(stop.set)
            for thread in threads:
                thread.join(timeout=LIMIT_S)
        assert not any(thread.is_alive() for thread in threads)


def site_fixture(
    server: ServerConfig | None = None, connection: type[Connection] = Connection, **changes: Any
) -> Any:
    """Returns a fixture of a module: a site whose model has these changes."""

    @pytest.fixture(scope="module")
    def site(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
        model, folder = replace(served_model, **changes), tmp_path_factory.mktemp("s")
        with running_site(model, folder, server, connection) as site:
            yield site

    return site
