"""One workload against one server: warm-up, flush, measurement, figures."""

from __future__ import annotations

import asyncio
import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from radixkv.bench.environment import environment
from radixkv.bench.load.accounting import Tokens, accounting, counted_by_metrics
from radixkv.bench.load.arrivals import Load, is_open_loop
from radixkv.bench.load.client import SILENCE_LIMIT_S, Client
from radixkv.bench.load.generator import LoadGenerator, RunInterrupted
from radixkv.bench.load.prompt_encoder import PromptEncoder
from radixkv.bench.load.record import Measurement
from radixkv.bench.report.run_metrics import Figures, figures
from radixkv.bench.session import Session, lone
from radixkv.bench.workloads.catalog import Workload, warmup_sessions
from radixkv.bench.workloads.parameters import MAX
from radixkv.bench.workloads.source import Source
from radixkv.errors import ConfigError, RadixKVError, shortened
from radixkv.terminal_progress import Progress

SETTLES_S = 1.0
"""Some servers count a moment after they have answered."""


class WarmUpFailed(RadixKVError):
    """The server does not answer what the run begins with."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    figures: Figures
    measurement: Measurement
    is_interrupted: bool = False
    """Whether the run was cancelled."""

    @property
    def errors(self) -> list[str]:
        """Why requests failed."""
        return [record.error for record in self.measurement.records if record.error is not None]


@dataclass(frozen=True)
class Bench:
    """A workload, made once, so that each server gets the same requests."""

    name: str
    workload: Workload
    sessions: Sequence[Session]
    left_out: Mapping[str, int]
    """What of the data set was left out or changed, by reason."""
    source: Source
    max_concurrency: int | None = None
    request_rate: float | None = None
    speed: float = 1.0
    warmup_requests: int = 2
    goodput: Mapping[str, float] = field(default_factory=dict)
    encoder: PromptEncoder | None = None
    has_extensions: bool = True
    request_timeout_s: float = SILENCE_LIMIT_S

    @classmethod
    def make(
        cls,
        name: str,
        workload: Workload,
        source: Source | None = None,
        *,
        max_concurrency: int | None = None,
        request_rate: float | None = None,
        speed: float | None = None,
        warmup_requests: int = 2,
        goodput: Mapping[str, float] | None = None,
        encoder: PromptEncoder | None = None,
        has_extensions: bool = True,
        request_timeout_s: float = SILENCE_LIMIT_S,
    ) -> Bench:
        """Makes the sessions.

        Args:
            name: of the workload, for the report.
            workload: what is asked.
            source: of its texts; its seed is also that of arrival times.
            max_concurrency: most requests in flight. None: the workload's in a closed loop, any in an open one.
            request_rate: as in ``Load``.
            speed: of the data set's clock; None: as it is.
            warmup_requests: unrelated requests before the run.
            goodput: limits in milliseconds for ``ttft``, ``tpot``, ``e2el``.
            encoder: makes token ids of all prompts.
            has_extensions: as in ``Load``.
            request_timeout_s: a request has failed if the server sends nothing for so long.

        Raises:
            ConfigError: a bad data set or setting.
        """
        for what, value in (("request_rate", request_rate), ("speed", speed), ("max_concurrency", max_concurrency)):
            if value is not None and not value > 0:
                raise ConfigError(f"{what} {value} must be above 0")
        if not 0 <= warmup_requests <= MAX:
            raise ConfigError(f"warmup_requests {warmup_requests} must be between 0 and {MAX}")
        source = source or Source()
        made = workload.make(source)
        is_open = is_open_loop(request_rate, made.sessions)
        if speed is not None and not (is_open and request_rate is None):
            raise ConfigError(f"speed {speed} needs a workload with a clock of its own, which {name} has not")
        return cls(
            name=name,
            workload=workload,
            sessions=made.sessions,
            left_out=made.counts,
            source=source,
            max_concurrency=max_concurrency or (None if is_open else workload.max_concurrency),
            request_rate=request_rate,
            speed=1.0 if speed is None else speed,
            warmup_requests=warmup_requests,
            goodput=goodput or {},
            encoder=encoder,
            has_extensions=has_extensions,
            request_timeout_s=request_timeout_s,
        )

    @property
    def n_requests(self) -> int:
        """Of all sessions."""
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
        """Measures the server at ``address`` from a cold cache.

        The warm-up's text is unrelated to the workload, and the cache is flushed after it where the server can.
        Cancelled while it measures, it returns what there is, as when the server goes away.

        Args:
            model: what the requests name; None takes the first that the server serves.
            cache: how the server is known to be set; None: not known.
            server: the flags that it was started with, but for the cache's; None: not known.
            api_key: what the server asks for, if it does.
            use_environment: whether the environment's proxies and certificates apply.

        Raises:
            ConfigError: no OpenAI-compatible server answers there, or ``model`` is no text.
            WarmUpFailed: a warm-up request failed.
        """
        if model is not None and _encodable(model) != model:
            raise ConfigError(f"model {shortened(model)} is not UTF-8; give the name that the server has for it")
        async with Client(
            address,
            api_key=api_key,
            use_environment=use_environment,
            silence_limit_s=self.request_timeout_s,
        ) as client:
            load = Load(
                model=model or await client.model(),
                max_concurrency=self.max_concurrency,
                request_rate=self.request_rate,
                speed=self.speed,
                seed=self.source.seed,
                has_extensions=self.has_extensions,
            )
            generator = LoadGenerator(client, self.encoder)
            await self._warm_up(generator, address, load)
            flushed = await client.flush()
            before = await _counted(client)
            measurement, is_interrupted = await self._measured(generator, load)
            counts = await _accounting(client, measurement, before)
        line = self._settings(load)
        line["server"] = None if server is None else [_encodable(flag) for flag in server]
        line |= {"cache": cache, "cache_flushed": flushed is not None}
        line |= figures(measurement, self.goodput)
        line["left_out"] = dict(self.left_out)
        line["accounting"] = counts
        line["environment"] = environment()
        return Outcome(line, measurement, is_interrupted)

    async def _warm_up(self, generator: LoadGenerator, address: str, load: Load) -> None:
        sessions = warmup_sessions(self.warmup_requests, self.source.seed)
        if self._begins_with_a_chat():
            sessions = [_as_chat(session) for session in sessions]  # a server may have no other endpoint
        closed = replace(load, max_concurrency=self.workload.max_concurrency, request_rate=math.inf)
        warmup = await generator.run(sessions, closed)
        for record in warmup.records:
            if record.error is not None and record.error_kind != "stopped":
                hint = "; --plain-requests leaves out what is not OpenAI's" if self.has_extensions else ""
                is_refused = record.error_kind in ("http_400", "http_422")
                raise WarmUpFailed(
                    f"a warm-up request to {address} failed: {record.error}{hint if is_refused else ''}"
                )

    def _begins_with_a_chat(self) -> bool:
        requests = next(self.sessions[0].turns(), ()) if self.sessions else ()
        return any(isinstance(request.prompt, list) for request in requests)

    async def _measured(self, generator: LoadGenerator, load: Load) -> tuple[Measurement, bool]:
        """Whether it was interrupted, too."""
        with Progress("requests", self.n_requests) as progress:
            try:
                return await generator.run(self.sessions, load, progress), False
            except RunInterrupted as interruption:
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
                return interruption.measurement, True

    def _settings(self, load: Load) -> Figures:
        """What the line says of what was asked for."""
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
            "speed": self.speed if rate == "trace" else None,
            "prompt_form": "text" if self.encoder is None else "tokens",
            "plain_requests": not self.has_extensions,
            "warmup_requests": self.warmup_requests,
            "goodput": dict(self.goodput) or None,
            "request_timeout_s": self.request_timeout_s,
            "seed": self.source.seed,
            "dataset": _encodable(self.source.dataset.name) if self.source.dataset else None,
        }


def _encodable(name: str) -> str:
    """A name on the command line may have bytes that are no UTF-8, and JSON may not."""
    return name.encode("utf-8", "replace").decode()


def _as_chat(session: Session) -> Session:
    """The same text, as a user's message."""
    (request,) = next(session.turns())
    return lone(replace(request, prompt=[{"role": "user", "content": request.prompt}]))


async def _accounting(client: Client, measurement: Measurement, before: Tokens | None) -> Figures:
    """The run's tokens; ``before`` is what the metrics said when it began."""
    counts = accounting(measurement.records, None)
    if before is None or measurement.aborted is not None:
        return counts
    for pause_s in (0.0, SETTLES_S):
        await asyncio.sleep(pause_s)
        after = await _counted(client)
        counts = accounting(measurement.records, None if after is None else after - before)
        if counts["agree"] is not False:
            break
    return counts


async def _counted(client: Client) -> Tokens | None:
    text = await client.metrics()
    return None if text is None else counted_by_metrics(text)
