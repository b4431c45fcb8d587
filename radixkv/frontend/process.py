"""``serve``: the whole server, from its settings to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp

from radixkv.checkpoints import Checkpoint, resolve, resolve_tokenizer
from radixkv.config import EngineConfig, ServerConfig
from radixkv.errors import ConfigError, Draining, RuntimeDied
from radixkv.frontend.app import build_app
from radixkv.frontend.file_limit import raise_file_limit
from radixkv.frontend.http.body import Bodies
from radixkv.frontend.http.connection import Connection
from radixkv.frontend.metrics.log import StatsLog, say, stage
from radixkv.frontend.metrics.prometheus import Metrics
from radixkv.frontend.runtime_process import Runtime, check
from radixkv.frontend.served_model import Served
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer

SLOW_READER_MS = 30_000
"""A connection whose client reads nothing for this long is cut."""
DRAIN_S = 30.0
"""How long running requests may go on after the first signal."""
QUIET_S = 0.2
"""An end that takes longer says what it waits for."""
REPLIES_S = 5.0
"""How long connections may take to be written out at the end."""
COLLECTED_AFTER = 20_000
"""New objects, which refer to each other and are not yet freed, until Python looks for cycles among them. Requests
leave almost none, and looking took 5% of the time and more at Python's own 700."""
DEATH_NOTICE_S = 2.0
"""How long ``/health`` says 503 before the server ends because the runtime did."""


def serve(engine: EngineConfig, server: ServerConfig) -> int:
    """Serves until a signal or the runtime's end; returns the process's exit code.

    Raises:
        ConfigError: the port is taken, or the settings do not fit the checkpoint.
        CheckpointError: there is no such model, or it is corrupt.
        RadixKVError: the runtime ended before it was ready.
    """
    raise_file_limit(engine.scheduler)
    with (
        claim(server.host, server.port) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_serve(engine, server, listener))


def claim(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ``ConfigError`` if the address is not to be had."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"host {host} cannot be used: {error.strerror}; choose another --host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # The kernel cuts readers that stop: uvicorn would keep their connection for as long as they like.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SLOW_READER_MS)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port {port} on {host} cannot be used: {error.strerror}; choose another --port, or 0 for a free one"
        ) from error
    return listener


class _Uvicorn(uvicorn.Server):
    """Signals are this module's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


@dataclass
class _Signals:
    """SIGTERM and SIGINT, counted."""

    first: asyncio.Event = field(default_factory=asyncio.Event)
    second: asyncio.Event = field(default_factory=asyncio.Event)

    def install(self) -> None:
        """From now on signals are events."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._take)

    def _take(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _serve(engine: EngineConfig, server: ServerConfig, listener: socket.socket) -> int:
    checkpoint, texts_folder, template = await _get_model(engine, server.chat_template)
    metrics = Metrics()
    async with stage(f"loading {checkpoint.folder}"):
        starting = asyncio.create_task(Runtime.start(engine, checkpoint.folder, metrics))
        try:
            tokenizer, longest = await asyncio.to_thread(_load_tokenizer, texts_folder)
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            raise
        runtime = await starting
    try:
        served = Served(
            name=server.served_model_name or checkpoint.name,
            root=checkpoint.name,
            ready=runtime.ready,
            tokenizer=tokenizer,
            eos_token_ids=checkpoint.eos_token_ids,
            created=int(time.time()),
            longest_token_characters=longest,
            chat_template=template,
            default_sampling=checkpoint.default_sampling,
        )
        bodies = Bodies(server.max_body_bytes)
        app = build_app(runtime.client, served, metrics, bodies, engine, server)
        async with _figures(runtime, metrics, server.stats_interval_s):
            return await _attend(runtime, served, bodies, _uvicorn(app), listener, server.heartbeat_timeout_s)
    finally:
        await runtime.stop()


async def _get_model(
    engine: EngineConfig, chat_template: str | None
) -> tuple[Checkpoint, Path, ChatTemplate | None]:
    """The checkpoint, the tokenizer's folder and the template. Weights are fetched last, if nothing speaks
    against it."""
    model = engine.model
    texts_folder = None
    if model.tokenizer is not None:
        async with stage(f"getting the tokenizer {model.tokenizer}"):
            texts_folder = await asyncio.to_thread(resolve_tokenizer, model.tokenizer)
    async with stage(f"getting the model {model.model}"):
        checkpoint = await asyncio.to_thread(resolve, model.model, model.revision, load_format="dummy")
    texts_folder = texts_folder or checkpoint.folder
    template = ChatTemplate.load(texts_folder, None if chat_template is None else Path(chat_template).expanduser())
    if model.load_format == "dummy" or checkpoint.has_weights:
        return checkpoint, texts_folder, template
    async with stage("checking that machine, settings and model fit"):
        await check(engine, checkpoint.folder)
    async with stage(f"getting the weights of {model.model}"):
        return await asyncio.to_thread(resolve, model.model, model.revision), texts_folder, template


def _uvicorn(app: ASGIApp) -> uvicorn.Server:
    return _Uvicorn(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(REPLIES_S),
        )
    )


@contextlib.asynccontextmanager
async def _figures(runtime: Runtime, metrics: Metrics, interval_s: float | None) -> AsyncIterator[None]:
    """Meanwhile the log says what the engine does."""
    if interval_s is None:
        yield
        return
    logging = asyncio.create_task(StatsLog(runtime.client, interval_s, metrics.look).run())
    try:
        yield
    finally:
        logging.cancel()
        await asyncio.gather(logging, return_exceptions=True)


def _load_tokenizer(folder: Path) -> tuple[Tokenizer | None, int | None]:
    """The tokenizer and its ``longest_token_characters``; None if there is none, and prompts are token ids."""
    if not (folder / "tokenizer.json").exists():
        return None, None
    tokenizer = Tokenizer.load(folder)
    return tokenizer, tokenizer.longest_token_characters


async def _attend(
    runtime: Runtime,
    served: Served,
    bodies: Bodies,
    http: uvicorn.Server,
    listener: socket.socket,
    heartbeat_timeout_s: float,
) -> int:
    """Serves HTTP until a signal or the runtime's end."""
    signals = _Signals()
    signals.install()
    death = asyncio.create_task(runtime.watch(heartbeat_timeout_s))
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    asked = asyncio.create_task(signals.first.wait())
    try:
        # A full collection over all that is loaded would stop the event loop for tens of milliseconds.
        gc.collect()
        gc.freeze()
        gc.set_threshold(COLLECTED_AFTER)
        _announce(served, listener)
        await asyncio.wait({death, serving, asked}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done() and not death.done():
            await _drain(runtime, bodies, signals, death)
        http.force_exit = signals.second.is_set()
        if not death.done():
            return 0
        bodies.refuse(death.result())
        say(str(death.result()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEATH_NOTICE_S):
                await signals.first.wait()
        return 1
    finally:
        http.should_exit = True
        await serving
        for task in (death, asked):
            task.cancel()
        await asyncio.gather(death, asked, return_exceptions=True)


async def _drain(runtime: Runtime, bodies: Bodies, signals: _Signals, death: asyncio.Task[RuntimeDied]) -> None:
    """Refuses new requests and lets running ones end, up to a limit or a second signal."""
    client = runtime.client
    client.refusal = Draining("the server is shutting down; send the request elsewhere")
    bodies.refuse(client.refusal)
    idle = asyncio.create_task(client.idle())
    hurried = asyncio.create_task(signals.second.wait())
    ends = {idle, hurried, death}
    done, _ = await asyncio.wait(ends, timeout=QUIET_S, return_when=asyncio.FIRST_COMPLETED)
    if not done:
        say(f"shutting down: running requests have up to {DRAIN_S:g} s to end, a second signal ends them at once")
        await asyncio.wait(ends, timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
    is_idle = idle.done()
    for task in (idle, hurried):
        task.cancel()
    await asyncio.gather(idle, hurried, return_exceptions=True)
    if not death.done():
        client.fail(Draining("the server shut down before the answer was complete"))
        if not is_idle:
            runtime.kill()


def _announce(served: Served, listener: socket.socket) -> None:
    for line in served.warnings:
        say(line)
    host, port = listener.getsockname()[:2]
    ready = served.ready
    print(
        f"radixkv ready on http://{f'[{host}]' if ':' in host else host}:{port} "
        f"(model {served.name}, {ready.n_pages} pages of {ready.page_size} tokens, "
        f"{ready.dtype} on {ready.device})",
        flush=True,
    )
