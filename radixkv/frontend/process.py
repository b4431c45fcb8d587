"""The server's frontend process, from its settings to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import os
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import uvicorn
import uvloop
from starlette.types import ASGIApp

from radixkv.checkpoints import Checkpoint, resolve, resolve_tokenizer
from radixkv.errors import ConfigError, Draining, RuntimeDied
from radixkv.frontend.adapter_loads import AdapterLoads
from radixkv.frontend.announcement import announce
from radixkv.frontend.api.server_info import public_settings
from radixkv.frontend.api.tokenize import read_tokenizer_info
from radixkv.frontend.app import build_app
from radixkv.frontend.canary import Canary
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.body import BodyReader
from radixkv.frontend.http.connection import Connection
from radixkv.frontend.in_flight import EndedRequest
from radixkv.frontend.metrics.log import log_line, log_misses, log_statistics
from radixkv.frontend.metrics.prometheus import Metrics
from radixkv.frontend.metrics.request_log import RequestLog, open_request_log
from radixkv.frontend.metrics.traces import RequestTraces, open_provider
from radixkv.frontend.miss_counts import MissRecord
from radixkv.frontend.replicas.client import ReplicasClient
from radixkv.frontend.replicas.placement import Placement
from radixkv.frontend.replicas.start import start_all, start_calls
from radixkv.frontend.replicas.supervisor import ReplicaSupervisor
from radixkv.frontend.runtime_client import RuntimeClient
from radixkv.frontend.runtime_process import preflight
from radixkv.frontend.served_model import ServedModel
from radixkv.frontend.supervisor import Supervisor
from radixkv.generation.nonces import NonceFilter
from radixkv.generation.parsers.answer_format import AnswerFormat
from radixkv.generation.reranking import answer_pooling
from radixkv.settings.config import EngineConfig
from radixkv.settings.server_config import ServerConfig
from radixkv.terminal import Progress
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import Pooling, Ready

SLOW_READER_TIMEOUT_MS = 30_000
"""How long a client may read nothing before the kernel closes its connection."""
DRAIN_TIMEOUT_S = 30.0
"""How long running requests may continue after the first signal."""
DRAIN_QUIET_S = 0.2
"""After this long, a drain logs what it waits for."""
RESPONSE_TIMEOUT_S = 5.0
"""How long uvicorn may take to finish responses at shutdown."""
GC_THRESHOLD = 20_000
"""Threshold of Python's cyclic garbage collector, in container objects allocated and not yet freed.

Requests leave almost no cycles. At Python's default of 700 the collector took 5% of the time and more.
"""
DEATH_NOTICE_PERIOD_S = 2.0
"""How long ``/health`` answers 503 after the runtime died for good, before the server exits."""
N_RESERVED_FILES = 64
"""Files that the server needs besides its clients' connections."""
_END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(engine: EngineConfig, server: ServerConfig) -> int:
    """Serves until a signal or the runtime's death, if it is not started again; returns the process's exit code.

    A signal before the server is ready ends the process with 128 plus the signal's number.

    Raises:
        ConfigError: the port is taken, the log of requests cannot be written, the packages of traces are missing,
            or the settings do not fit the checkpoint.
        CheckpointError: the model does not exist or is corrupt.
        RadixKVError: the runtime ended before it was ready.
    """
    n_queues = max(1, len(engine.tenants))
    n_queues *= server.data_parallel_size
    n_rows = (engine.scheduler.max_num_seqs or 0) * server.data_parallel_size
    raise_file_limit(n_queues * engine.scheduler.max_queued_requests, n_rows)
    with (
        open_listener(server.host, server.port) as listener,
        contextlib.ExitStack() as files,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        reports: list[Callable[[ServedModel], Callable[[EndedRequest], None]]] = []
        if server.request_log is not None:
            write = files.enter_context(open_request_log(server.request_log))
            reports.append(lambda model: RequestLog(model.name, write, model.adapter_names).add)
        if server.otlp_traces_endpoint is not None:
            provider = files.enter_context(open_provider(server.otlp_traces_endpoint))
            reports.append(lambda model: RequestTraces(model.name, provider, model.adapter_names).add)
        return runner.run(_serve(engine, server, listener, reports))


def raise_file_limit(max_queued_requests: int, max_num_seqs: int | None) -> None:
    """Raises the soft limit of open files to the hard limit. Logs a line if it is below the queue's need.

    A client that connects beyond the limit is disconnected without a response, even without the full queue's 503.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a hard limit above what the system gives to any process
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_needed = max_queued_requests + (max_num_seqs or 0) + N_RESERVED_FILES
    if limit != resource.RLIM_INFINITY and limit < n_needed:
        log_line(
            f"this process may open {limit} files, but needs {n_needed} for a queue of max_queued_requests "
            f"{max_queued_requests}; clients beyond the limit are disconnected without a reply: "
            "raise the hard limit (ulimit -H -n), or give a lower --max-queued-requests"
        )


def open_listener(host: str, port: int) -> socket.socket:
    """Opens the listening socket; port 0 takes a free one. Raises ``ConfigError`` if the address is unavailable."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"host {host} cannot be used: {error.strerror}; choose another --host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # The kernel closes connections of clients that stop reading: uvicorn has no limit for them.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SLOW_READER_TIMEOUT_MS)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        is_taken = error.errno == errno.EADDRINUSE
        why = "is used by another program; stop that" if is_taken else f"cannot be used: {error.strerror}; free it"
        raise ConfigError(
            f"port {port} on {host} {why}, or choose another --port (0 for a free one) and tell clients, as with "
            "radixkv chat --base-url http://127.0.0.1:PORT"
        ) from error
    return listener


class Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, because this module handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures no signal."""
        yield


@dataclass
class _Signals:
    """SIGTERM and SIGINT as events: the first signal ends the start or drains, the second ends at once."""

    first: asyncio.Event = field(default_factory=asyncio.Event)
    second: asyncio.Event = field(default_factory=asyncio.Event)
    first_number: signal.Signals = signal.SIGTERM
    """The first signal, once there is one."""

    def install(self) -> None:
        """Installs the handlers in the running loop."""
        loop = asyncio.get_running_loop()
        for number in _END_SIGNALS:
            loop.add_signal_handler(number, self._count, number)

    def _count(self, number: signal.Signals) -> None:
        if self.first.is_set():
            self.second.set()
        else:
            self.first_number = number
            self.first.set()

    @contextlib.contextmanager
    def left_to_kernel(self) -> Iterator[None]:
        """Lets the kernel end the process at a signal while a thread may hold the GIL, so that no handler can run.

        The runtime notices the end, removes its socket and ends, too. The kernel spares a container's first
        process: there the handlers stay, and run after the block.
        """
        if os.getpid() == 1:
            yield
            return
        handlers = {number: signal.signal(number, signal.SIG_DFL) for number in _END_SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


async def _serve(
    engine: EngineConfig,
    server: ServerConfig,
    listener: socket.socket,
    reports: Sequence[Callable[[ServedModel], Callable[[EndedRequest], None]]],
) -> int:
    signals = _Signals()
    signals.install()
    metrics, misses = Metrics(), MissRecord()
    replicas = [
        RuntimeClient(metrics, misses, shows_contents=server.may_explain_contents)
        for _ in range(server.data_parallel_size)
    ]
    try:
        starting = asyncio.create_task(_start(engine, server, replicas, signals))
        signalled = asyncio.create_task(signals.first.wait())
        await asyncio.wait({starting, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            log_line(f"{signals.first_number.name} ended the start")
            # A thread may wait for the hub without end, and the interpreter would wait for the thread.
            os._exit(128 + signals.first_number)
        supervisor, served_model, adapter_loads = starting.result()
        client: EngineClient = replicas[0]
        if len(replicas) > 1:
            client = ReplicasClient(replicas, metrics, misses, Placement(served_model.beginning))
        client.on_end.extend(open_report(served_model) for open_report in reports)
        try:
            body_reader = BodyReader(server.max_body_bytes, log=log_line)
            app = build_app(
                client,
                served_model,
                adapter_loads,
                metrics,
                body_reader,
                api_key=server.api_key,
                tenant_keys=server.tenants.names,
                allowed_origins=server.allowed_origins,
                metrics_compat=server.metrics_compat,
                explain_contents=server.may_explain_contents,
                settings=public_settings(engine, server),
            )
            async with _background_tasks(client, replicas, served_model, metrics, server):
                return await _serve_until_end(
                    supervisor,
                    client,
                    functools.partial(
                        announce,
                        served_model,
                        listener,
                        needs_key=server.needs_key,
                        n_replicas=server.data_parallel_size,
                    ),
                    body_reader,
                    _uvicorn(app),
                    listener,
                    server.heartbeat_timeout_s,
                    signals,
                )
        finally:
            await supervisor.stop()
    finally:
        for replica in replicas:
            await replica.close()


async def _start(
    engine: EngineConfig, server: ServerConfig, clients: Sequence[RuntimeClient], signals: _Signals
) -> tuple[Supervisor | ReplicaSupervisor, ServedModel, AdapterLoads]:
    """Gets the model and starts the runtimes with it. If cancelled, leaves no process and no folder."""
    adapters_folder = _adapters_folder(engine, server)
    checkpoint, texts_folder, template = await _get_model(engine, server)
    name, *other_names = server.served_model_names or (checkpoint.name,)
    for adapter in engine.adapters.lora_modules:
        if adapter.name in (name, *other_names):
            raise ConfigError(
                f"lora_modules has an adapter of the name {adapter.name!r}, which is the model's; give it another "
                "name, or the model by --served-model-name"
            )
    with Progress(f"loading {checkpoint.folder}", is_log=True):
        starts = start_calls(engine, checkpoint.folder, texts_folder, clients)
        starting = asyncio.create_task(start_all([start() for start in starts]))
        try:
            # The tokenizers package holds the GIL while it reads a file: seconds for millions of tokens.
            with signals.left_to_kernel():
                tokenizer, longest = await asyncio.to_thread(_load_tokenizer, texts_folder)
            pooling = answer_pooling(tokenizer) if engine.model.task == "score" else Pooling()
            tokenizer_info = await asyncio.to_thread(read_tokenizer_info, texts_folder)
            answer_format = await asyncio.to_thread(
                AnswerFormat.load,
                texts_folder,
                template,
                server.tool_call_parser,
                server.reasoning_parser,
                tokenizer,
            )
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            raise
        runtimes = await starting
    served_model = ServedModel(
        name=name,
        other_names=tuple(other_names),
        root=checkpoint.name,
        ready=_joint_ready([runtime.ready for runtime in runtimes]),
        tokenizer=tokenizer,
        tokenizer_info=tokenizer_info,
        eos_token_ids=checkpoint.eos_token_ids,
        created=int(time.time()),
        max_token_characters=longest,
        chat_template=template,
        answer_format=answer_format,
        default_sampling=checkpoint.default_sampling,
        priority_range=server.allowed_priorities,
        caches_prompts=engine.cache.enable_prefix_caching,
        pins_prompts=engine.cache.enable_prefix_caching and engine.cache.pin_budget > 0,
        learns_pauses=server.learn_pauses,
        task=engine.model.task,
        pooling=pooling,
        normalizes=checkpoint.normalizes,
        hidden_size=checkpoint.hidden_size,
        names_tokens_by_id=server.return_tokens_as_token_ids,
        nonce_filter=None if server.keep_nonces else NonceFilter(),
    )
    restarts = server.restart_runtime or len(clients) > 1
    adapter_loads = AdapterLoads(
        clients, served_model, folder=adapters_folder, are_served=engine.adapters.has_adapters
    )
    supervisors = [
        Supervisor(
            runtime,
            client,
            functools.partial(start, pool_of=runtime.ready),
            restarts=restarts,
            resume=adapter_loads.resume,
        )
        for runtime, client, start in zip(runtimes, clients, starts, strict=True)
    ]
    supervisor = supervisors[0] if len(supervisors) == 1 else ReplicaSupervisor(supervisors)
    return supervisor, served_model, adapter_loads


def _adapters_folder(engine: EngineConfig, server: ServerConfig) -> Path | None:
    """Returns the folder inside which clients may have adapters loaded; None: nowhere. Raises ``ConfigError``."""
    if server.lora_dir is None:
        return None
    if not engine.adapters.has_adapters:
        raise ConfigError(f"lora_dir {server.lora_dir} is for a server with adapters; add --enable-lora")
    folder = Path(server.lora_dir).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"lora_dir {server.lora_dir} is no folder; give the one that has the folders of adapters")
    return folder


def _joint_ready(all_ready: Sequence[Ready]) -> Ready:
    """Returns the sizes of a server: a request must fit the smallest pool, and all rows of all replicas may run.

    Raises:
        ConfigError: the replicas have read different adapters.
    """
    if any(ready.adapters != all_ready[0].adapters for ready in all_ready):
        raise ConfigError("the folders of lora_modules changed while the replicas started; start the server again")
    smallest = min(all_ready, key=lambda ready: ready.n_pages)
    return msgspec.structs.replace(smallest, max_num_seqs=len(all_ready) * smallest.max_num_seqs)


async def _get_model(engine: EngineConfig, server: ServerConfig) -> tuple[Checkpoint, Path, ChatTemplate | None]:
    """Returns the checkpoint, the tokenizer's folder and the chat template.

    Weights are downloaded last, after the preflight has found that the model fits.
    """
    model = engine.model
    texts_folder = None
    if model.tokenizer is not None:
        with Progress(f"getting the tokenizer {model.tokenizer}", is_log=True) as progress:
            texts_folder = await asyncio.to_thread(resolve_tokenizer, model.tokenizer, show_download=progress.show)
    find = functools.partial(resolve, model.model, model.revision, tokenizer_folder=texts_folder, task=model.task)
    with Progress(f"getting the model {model.model}", is_log=True) as progress:
        checkpoint = await asyncio.to_thread(find, load_format="dummy", show_download=progress.show)
    texts_folder = texts_folder or checkpoint.folder
    override = None if server.chat_template is None else Path(server.chat_template).expanduser()
    template = await asyncio.to_thread(ChatTemplate.load, texts_folder, override)
    has_weights = model.load_format == "dummy" or checkpoint.has_weights
    # Several runtimes see only their own GPUs, and could not say that there are too few.
    if not has_weights or server.data_parallel_size > 1:
        with Progress("checking that machine, settings and model fit", is_log=True):
            await preflight(engine, checkpoint.folder, data_parallel_size=server.data_parallel_size)
    if has_weights:
        return checkpoint, texts_folder, template
    with Progress(f"getting the weights of {model.model}", is_log=True) as progress:
        checkpoint = await asyncio.to_thread(find, show_download=progress.show)
    return checkpoint, texts_folder, template


def _uvicorn(app: ASGIApp) -> uvicorn.Server:
    return Uvicorn(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(RESPONSE_TIMEOUT_S),
        )
    )


@contextlib.asynccontextmanager
async def _background_tasks(
    client: EngineClient,
    replicas: Sequence[RuntimeClient],
    served_model: ServedModel,
    metrics: Metrics,
    server: ServerConfig,
) -> AsyncIterator[None]:
    """Logs statistics and cache misses, and runs the canary, inside the context, as the settings say.

    Raises:
        ConfigError: the context is too short for the canary.
    """
    runs: list[Coroutine[None, None, None]] = []
    if server.canary_interval_s is not None:
        runs += [Canary(each, served_model, metrics, server.canary_interval_s).run() for each in replicas]
    if server.stats_interval_s is not None:
        runs.append(log_statistics(client, server.stats_interval_s, metrics.set_stats_delta))
        runs.append(log_misses(client.take_recent_misses, served_model.tokenizer))
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _load_tokenizer(folder: Path) -> tuple[Tokenizer | None, int | None]:
    """Loads the tokenizer and its ``max_token_characters``; both None without ``tokenizer.json``."""
    if not (folder / "tokenizer.json").exists():
        return None, None
    tokenizer = Tokenizer.load(folder)
    return tokenizer, tokenizer.max_token_characters


async def _serve_until_end(
    supervisor: Supervisor | ReplicaSupervisor,
    client: EngineClient,
    print_ready: Callable[[], None],
    body_reader: BodyReader,
    http: uvicorn.Server,
    listener: socket.socket,
    heartbeat_timeout_s: float,
    signals: _Signals,
) -> int:
    """Serves HTTP until a signal or until the supervisor gives up. Returns the exit code."""
    death = asyncio.create_task(supervisor.run(heartbeat_timeout_s))
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    signalled = asyncio.create_task(signals.first.wait())
    try:
        # A full collection of all loaded objects would stop the event loop for tens of milliseconds.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        print_ready()
        await asyncio.wait({death, serving, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if signalled.done() and not death.done():
            supervisor.stop_restarting()
            await _drain(supervisor, client, body_reader, signals, death)
        http.force_exit = signals.second.is_set()
        if not death.done():
            return 0
        body_reader.refuse(death.result())
        log_line(str(death.result()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEATH_NOTICE_PERIOD_S):
                await signals.first.wait()
        return 1
    finally:
        http.should_exit = True
        await serving
        for task in (death, signalled):
            task.cancel()
        await asyncio.gather(death, signalled, return_exceptions=True)


async def _drain(
    supervisor: Supervisor | ReplicaSupervisor,
    client: EngineClient,
    body_reader: BodyReader,
    signals: _Signals,
    death: asyncio.Task[RuntimeDied],
) -> None:
    """Refuses new requests and waits for running ones, up to ``DRAIN_TIMEOUT_S`` or a second signal."""
    log_line(f"{signals.first_number.name} ends the server")
    client.refusal = Draining("the server is shutting down; send the request elsewhere")
    body_reader.refuse(client.refusal)
    idle = asyncio.create_task(client.idle())
    second_signal = asyncio.create_task(signals.second.wait())
    ends = {idle, second_signal, death}
    done, _ = await asyncio.wait(ends, timeout=DRAIN_QUIET_S, return_when=asyncio.FIRST_COMPLETED)
    if not done:
        log_line(
            f"shutting down: running requests have up to {DRAIN_TIMEOUT_S:g} s to end, "
            "a second signal ends them at once"
        )
        await asyncio.wait(ends, timeout=DRAIN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    is_idle = idle.done()
    for task in (idle, second_signal):
        task.cancel()
    await asyncio.gather(idle, second_signal, return_exceptions=True)
    if not death.done():
        if not is_idle:
            supervisor.kill()
        client.fail(Draining("the server shut down before the answer was complete"))
