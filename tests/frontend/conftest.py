from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import httpx
import pytest
import uvicorn
from scripted import EOS, MAX_MODEL_LEN, ScriptedLoop, Site, write_tokenizer

from radixkv.frontend.app import build_app
from radixkv.frontend.bodies import Bodies
from radixkv.frontend.client import Client
from radixkv.frontend.metrics import Metrics
from radixkv.frontend.openai import Served
from radixkv.frontend.server import _Uvicorn, claim
from radixkv.runtime.main import Server, _bound
from radixkv.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def served(tokenizer: Tokenizer) -> Served:
    return Served("echo", "some/echo", ScriptedLoop().ready, tokenizer, frozenset({EOS}), 1_700_000_000, 5)


@pytest.fixture(scope="module")
def site(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    scripted = ScriptedLoop()
    started: Future[tuple[Client, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    path = tmp_path_factory.mktemp("s") / "runtime.sock"
    assert served.ready.max_model_len == MAX_MODEL_LEN

    def serve_runtime() -> None:
        with _bound(path) as socket:
            Server(socket, scripted).run()

    async def serve_http() -> None:
        metrics, stop = Metrics(), asyncio.Event()
        client = Client(str(path), metrics)
        await client.handshake()
        app = build_app(client, served, metrics, Bodies(100_000, limit_s=1.0))
        http = _Uvicorn(uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_config=None))
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        started.set_result((client, asyncio.get_running_loop(), stop))
        await stop.wait()
        client.drain()
        http.should_exit = True
        await serving
        await client.close()

    with claim("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        threads = [
            threading.Thread(target=serve_runtime),
            threading.Thread(target=asyncio.run, args=(serve_http(),)),
        ]
        for thread in threads:
            thread.start()
        client, events, stop = started.result(timeout=20)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
            yield Site(http, port, scripted, client, events)
        events.call_soon_threadsafe(stop.set)
        for thread in threads:
            thread.join(timeout=20)
            assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "site" in request.fixturenames:
        site: Site = request.getfixturevalue("site")
        site.call(site.client.idle())
