"""Measurement of one workload on one server."""

from __future__ import annotations

import asyncio
import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from radixkv.client.http import SILENCE_LIMIT_S
from radixkv.errors import ConfigError, RadixKVError, shortened
from radixkv.lab.bench.environment import environment
from radixkv.lab.bench.load.accounting import accounting
from radixkv.lab.bench.load.arrivals import Load, is_open_loop
from radixkv.lab.bench.load.client import OpenAIClient
from radixkv.lab.bench.load.generator import LoadGenerator, RunInterrupted
from radixkv.lab.bench.load.record import Measurement
from radixkv.lab.bench.load.requests import PromptEncoder
from radixkv.lab.bench.load.server_counters import DraftTokenCounts, ServerCounts, server_counts
from radixkv.lab.bench.report.run_metrics import Metrics, run_metrics
from radixkv.lab.bench.session import Session, single_request_session
from radixkv.lab.bench.workloads.base import MAX_COUNT, Source
from radixkv.lab.bench.workloads.catalog import Workload, warmup_sessions
from radixkv.terminal import Progress

METRICS_DELAY_S = 1.0
"""Wait before the second reading of ``/metrics``: some servers update their counters after the last answer."""


class WarmUpFailed(RadixKVError):
    """The server failed a warm-up request."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    metrics: Metrics
    """The object of the run's JSON line."""
    measurement: Measurement
    is_interrupted: bool = False
    """Whether the run was cancelled."""

    @property
    def errors(self) -> list[str]:
        """The errors of the failed requests."""
        return [record.error for record in self.measurement.records if record.error is not None]


@dataclass
class Benchmark:
    """A workload's sessions and how they are sent; every server that is measured gets the same requests.

    Raises:
        ConfigError: a data set that cannot be used, or a setting out of its range.
    """

    name: str
    """The workload's name in reports."""
    workload: Workload
    """The workload and its parameters."""
    source: Source = field(default_factory=Source)
    """Where the texts come from; its seed also seeds the arrival times."""
    max_concurrency: int | None = None
    """Maximum number of requests in flight.

    None in a closed loop: becomes the workload's own limit. None in an open loop: there is no limit.
    """
    request_rate: float | None = None
    """As in ``Load``."""
    speed: float | None = None
    """Factor by which the data set's arrival times are sped up; None: 1."""
    warmup_requests: int = 2
    """Number of requests before the run; their texts are unrelated to the workload."""
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Limits in milliseconds for ``ttft``, ``tpot``, ``e2el``."""
    encoder: PromptEncoder | None = None
    """Encodes all prompts to token ids. None: prompts are sent as they are."""
    has_extensions: bool = True
    """As in ``Load``."""
    request_timeout_s: float = SILENCE_LIMIT_S
    """A request fails if the server sends nothing for this long."""

    def __post_init__(self) -> None:
        for setting in ("request_rate", "speed", "max_concurrency"):
            value = vars(self)[setting]
            if value is not None and not value > 0:
                raise ConfigError(f"{setting} {value} must be above 0")
        if not 0 <= self.warmup_requests <= MAX_COUNT:
            raise ConfigError(f"warmup_requests {self.warmup_requests} must be between 0 and {MAX_COUNT}")
        loaded = self.workload.make(self.source)
        self.sessions: Sequence[Session] = loaded.sessions
        self.left_out = loaded.counts
        """Number of data set items that were left out or changed, by reason."""
        is_open = is_open_loop(self.request_rate, self.sessions)
        if self.speed is not None and not (is_open and self.request_rate is None):
            raise ConfigError(
                f"speed {self.speed} needs a workload that has arrival times, and no request_rate; "
                f"leave it out for {self.name}"
            )
        if self.max_concurrency is None and not is_open:
            self.max_concurrency = self.workload.max_concurrency

    @property
    def n_requests(self) -> int:
        """Number of requests in all sessions."""
        return sum(session.n_requests for session in self.sessions)

    async def run(
        self,
        address: str,
        *,
        model: str | None = None,
        cache: Literal["on", "off"] | None = None,
        server: Sequence[str] | None = None,
        api_key: str | None = None,
        use_environment: bool = False,
    ) -> Outcome:
        """Measures the server at ``address``, starting from a cold cache.

        Warms up with texts that are unrelated to the workload, then flushes the cache if the server has an endpoint
        for that. If the measurement is cancelled or the server goes away, the outcome has the requests until then.

        Args:
            address: base URL of the server.
            model: model name in the requests. None: the first model that the server lists.
            cache: the known state of the server's prefix cache. None: not known.
            server: the flags that the server was started with, without those of the cache. None: not known.
            api_key: sent as bearer token. None: no key is sent.
            use_environment: whether proxies and certificates of the environment apply.

        Raises:
            ConfigError: no OpenAI-compatible server answers at ``address``, or ``model`` is not valid UTF-8.
            WarmUpFailed: a warm-up request failed.
        """
        if model is not None and _encodable(model) != model:
            raise ConfigError(f"model {shortened(model)} is not UTF-8; give the name that the server has for it")
        async with OpenAIClient(
            address,
            api_key=api_key,
            use_environment=use_environment,
            silence_limit_s=self.request_timeout_s,
        ) as client:
            load = Load(
                model=model or await client.model(),
                max_concurrency=self.max_concurrency,
                request_rate=self.request_rate,
                speed=self.speed or 1.0,
                seed=self.source.seed,
                has_extensions=self.has_extensions,
            )
            generator = LoadGenerator(client, self.encoder)
            with Progress("warming up"):
                await self._warm_up(generator, address, load)
            flushed = await client.flush()
            before = await _read_server_counts(client)
            measurement, is_interrupted = await self._measure(generator, load, cache)
            counts, drafts = await _accounting(client, measurement, before)
        line = self._settings(load)
        line["server"] = None if server is None else [_encodable(flag) for flag in server]
        line |= {"cache": cache, "cache_flushed": flushed is not None}
        line |= run_metrics(measurement, self.goodput, counts_repeats=self.workload.repeats_chunks, drafts=drafts)
        line["left_out"] = dict(self.left_out)
        line["accounting"] = counts
        line["environment"] = environment()
        return Outcome(line, measurement, is_interrupted)

    async def _warm_up(self, generator: LoadGenerator, address: str, load: Load) -> None:
        sessions = warmup_sessions(self.warmup_requests, self.source.seed)
        if self._starts_with_chat():
            sessions = [_as_chat(session) for session in sessions]  # a server may have no /v1/completions
        closed_loop = replace(load, max_concurrency=self.workload.max_concurrency, request_rate=math.inf)
        warmup = await generator.run(sessions, closed_loop)
        for record in warmup.records:
            if record.error is not None and record.error_kind != "stopped":
                hint = (
                    "; --plain-requests leaves out fields that OpenAI does not have" if self.has_extensions else ""
                )
                is_refused = record.error_kind in ("http_400", "http_422")
                raise WarmUpFailed(
                    f"a warm-up request to {address} failed: {record.error}{hint if is_refused else ''}"
                )

    def _starts_with_chat(self) -> bool:
        requests = next(self.sessions[0].turns(), ()) if self.sessions else ()
        return any(isinstance(request.prompt, list) for request in requests)

    async def _measure(
        self, generator: LoadGenerator, load: Load, cache: Literal["on", "off"] | None
    ) -> tuple[Measurement, bool]:
        """Returns the measurement and whether it was interrupted."""
        activity = "sending requests" if cache is None else f"sending requests, cache {cache}"
        with Progress(activity) as progress:
            try:
                return await generator.run(self.sessions, load, progress), False
            except RunInterrupted as interruption:
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
                return interruption.measurement, True

    def _settings(self, load: Load) -> Metrics:
        """Returns the keys of the JSON line that describe workload and load."""
        rate: float | str = "inf"
        if is_open_loop(self.request_rate, self.sessions):
            rate = "trace" if self.request_rate is None else self.request_rate
        return {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "workload": _encodable(self.name),
            "model": load.model,
            "num_prompts": self.n_requests,
            **msgspec.structs.asdict(self.workload),
            "num_requests": self.n_requests,
            "max_concurrency": load.max_concurrency,
            "request_rate": rate,
            "speed": (self.speed or 1.0) if rate == "trace" else None,
            "prompt_form": "text" if self.encoder is None else "tokens",
            "plain_requests": not self.has_extensions,
            "warmup_requests": self.warmup_requests,
            "goodput": dict(self.goodput) or None,
            "request_timeout_s": self.request_timeout_s,
            "seed": self.source.seed,
            "dataset": _encodable(self.source.dataset.name) if self.source.dataset else None,
        }


def _encodable(name: str) -> str:
    """Replaces bytes that are not UTF-8: a command-line argument may have them, JSON may not."""
    return name.encode("utf-8", "replace").decode()


def _as_chat(session: Session) -> Session:
    """Returns a session that sends the same text as a user's message."""
    (request,) = next(session.turns())
    return single_request_session(replace(request, prompt=[{"role": "user", "content": request.prompt}]))


async def _accounting(
    client: OpenAIClient, measurement: Measurement, before: ServerCounts | None
) -> tuple[Metrics, DraftTokenCounts | None]:
    """Returns the counts of the run's tokens, and the server's of its drafts.

    Args:
        client: of the server.
        measurement: of the run.
        before: the server's counters from before the run.
    """
    counts, drafts = accounting(measurement.records, None), None
    if before is None or measurement.aborted is not None:
        return counts, drafts
    for pause_s in (0.0, METRICS_DELAY_S):
        await asyncio.sleep(pause_s)
        after = await _read_server_counts(client)
        increase = None if after is None else after - before
        counts = accounting(measurement.records, None if increase is None else increase.tokens)
        drafts = None if increase is None else increase.drafts
        if counts["agree"] is not False:
            break
    return counts, drafts


async def _read_server_counts(client: OpenAIClient) -> ServerCounts | None:
    text = await client.metrics()
    return None if text is None else server_counts(text)
