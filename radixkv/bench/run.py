"""One workload against one server: warm-up, flush, measurement, figures."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from radixkv.bench.environment import environment
from radixkv.bench.figures import Figures, figures
from radixkv.bench.load import Load, LoadGenerator, Session
from radixkv.bench.record import BadReply
from radixkv.bench.workloads import Workload, warmup_sessions
from radixkv.errors import ConfigError
from radixkv.progress import Progress


@dataclass(frozen=True)
class Outcome:
    """A run's figures, and why requests failed."""

    figures: Figures
    errors: Sequence[str]


@dataclass(frozen=True)
class Bench:
    """A workload, made once, so that each server gets the same requests."""

    name: str
    workload: Workload
    sessions: Sequence[Session]
    seed: int = 0
    dataset: Path | None = None
    request_rate: float = math.inf
    warmup_requests: int = 2
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Limits in milliseconds for ``ttft``, ``tpot``, ``e2el``."""

    @classmethod
    def make(
        cls,
        name: str,
        workload: Workload,
        *,
        seed: int = 0,
        dataset: Path | None = None,
        request_rate: float = math.inf,
        warmup_requests: int = 2,
        goodput: Mapping[str, float] | None = None,
    ) -> Bench:
        """Makes the texts. Raises ``ConfigError`` for a bad data set or setting."""
        if not request_rate > 0:
            raise ConfigError(f"request_rate {request_rate} must be above 0")
        if warmup_requests < 0:
            raise ConfigError(f"warmup_requests {warmup_requests} must be at least 0")
        return cls(
            name=name,
            workload=workload,
            sessions=workload.sessions(seed, dataset),
            seed=seed,
            dataset=dataset,
            request_rate=request_rate,
            warmup_requests=warmup_requests,
            goodput=goodput or {},
        )

    async def run(
        self,
        address: str,
        *,
        model: str | None = None,
        cache: Literal["on", "off"] | None = None,
        api_key: str | None = None,
        use_environment: bool = False,
    ) -> Outcome:
        """Measures the server at ``address`` from a cold cache.

        The warm-up's text is unrelated to the workload, and the cache is flushed after it where the server can.

        Args:
            model: what the requests name; None takes the first that the server serves.
            cache: how the server is known to be set; None: not known.
            api_key: what the server asks for, if it does.
            use_environment: whether the environment's proxies and certificates apply.

        Raises:
            ConfigError: no OpenAI-compatible server answers there.
            BadReply: a warm-up request failed.
        """
        async with LoadGenerator(address, api_key=api_key, use_environment=use_environment) as generator:
            load = Load(
                model=model or await generator.model(),
                output_len=self.workload.output_len,
                max_concurrency=self.workload.max_concurrency,
                request_rate=self.request_rate,
                seed=self.seed,
            )
            at_once = dataclasses.replace(load, request_rate=math.inf)
            warmup = await generator.run(warmup_sessions(self.warmup_requests, self.seed), at_once)
            for record in warmup.records:
                if record.error is not None:
                    raise BadReply(f"a warm-up request to {address} failed: {record.error}")
            flushed = await generator.flush()
            n_requests = sum(map(len, self.sessions))
            with Progress("requests", n_requests) as progress:
                measurement = await generator.run(self.sessions, load, progress)
        line: Figures = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "workload": self.name,
            "model": load.model,
            "cache": cache,
            "cache_flushed": flushed,
            "num_prompts": n_requests,
            **msgspec.structs.asdict(self.workload),
            "request_rate": self.request_rate if math.isfinite(self.request_rate) else "inf",
            "warmup_requests": self.warmup_requests,
            "seed": self.seed,
            "dataset": self.dataset.name if self.dataset else None,
        }
        line |= figures(measurement, self.goodput)
        line["environment"] = environment()
        errors = [record.error for record in measurement.records if record.error is not None]
        return Outcome(figures=line, errors=errors)
