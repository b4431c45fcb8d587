"""Traces of requests, sent to a collector with OpenTelemetry."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from radixkv.errors import ConfigError
from radixkv.frontend.in_flight import EndedRequest
from radixkv.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SPAN = "llm_request"
"""The name of a request's span; vLLM's."""
_EXPORT_TIMEOUT_S = 5.0
"""How long an export, and the last one at the end of the server, may take."""


class RequestTraces:
    """Makes spans of each request that ends: the request, and in it its time in the queue, prefill and decode.

    The span ``load`` of a request that waited for pages from other tiers lies within its time in the queue.

    The spans are made when the request has ended, with the times that were measured. A request continues the trace
    of its client's ``traceparent`` (W3C Trace Context); without one it begins a trace.

    Args:
        model: the served model's name.
        provider: gets the spans.
        adapters: names of the model's adapters by their digests.
    """

    def __init__(
        self, model: str, provider: TracerProvider, adapters: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        self._adapters = adapters
        self._tracer = provider.get_tracer("radixkv", __version__)

    def add(self, ended: EndedRequest) -> None:
        """Makes the spans of a request. O(1)."""
        to_wall_ns = time.time_ns() - time.monotonic_ns()

        def wall_ns(at: float) -> int:
            return int(at * 1e9) + to_wall_ns

        parent = self._propagator.extract(ended.arrival.trace_headers)
        span = self._tracer.start_span(
            SPAN,
            context=parent,
            kind=self._api.SpanKind.SERVER,
            attributes=self._attributes(ended),
            start_time=wall_ns(ended.arrival.at),
        )
        if ended.error_code is not None:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, ended.error_code))
        own = self._api.set_span_in_context(span)
        for name, begun, end in _phases(ended):
            child = self._tracer.start_span(name, context=own, start_time=wall_ns(begun))
            child.end(wall_ns(end))
        span.end(wall_ns(ended.ended_at))

    def _attributes(self, ended: EndedRequest) -> dict[str, str | bool | int | float | tuple[str, ...]]:
        """Returns the attributes of OpenTelemetry's conventions for generative AI, those of vLLM, and ours."""
        prompt, done, sampling = ended.prompt, ended.done, ended.prompt.sampling
        attributes: dict[str, str | bool | int | float | tuple[str, ...]] = {
            "http.route": ended.arrival.route,
            "http.response.header.x-request-id": (ended.arrival.request_id,),
            "gen_ai.response.model": self._adapters.get(prompt.namespace.adapter, self._model),
            "gen_ai.request.id": prompt.id,
            "gen_ai.request.n": sampling.n,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.usage.prompt_tokens": len(prompt.tokens) // 4,
            "gen_ai.usage.completion_tokens": ended.n_output,
            "gen_ai.latency.e2e": ended.ended_at - ended.arrival.at,
            "radixkv.priority": prompt.priority,
        }
        if sampling.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
        if ended.first_token_at is not None:
            attributes["gen_ai.latency.time_to_first_token"] = ended.first_token_at - ended.arrival.at
        if ended.finish_reasons:
            attributes["gen_ai.response.finish_reasons"] = ended.finish_reasons
        if ended.error_code is not None:
            attributes["error.type"] = ended.error_code
        if ended.client_left:
            attributes["radixkv.client_disconnected"] = True
        if done is not None:
            attributes |= {
                "gen_ai.latency.time_in_queue": done.queue_time_s,
                "gen_ai.usage.cache_read.input_tokens": done.cache_use.n_cached,
            }
        for tier, n_tokens in (ended.cached_tokens or {}).items():
            attributes[f"radixkv.cached_tokens.{tier}"] = n_tokens
        return attributes


def _phases(ended: EndedRequest) -> Iterator[tuple[str, float, float]]:
    """Yields the name, begin and end of each phase of a request whose times are known, in order."""
    first = ended.first_token_at
    if ended.done is not None:
        until = ended.ended_at if first is None else first
        scheduled = min(ended.sent_at + ended.done.queue_time_s, until)
        yield "queue", ended.sent_at, scheduled
        if ended.done.load_interval_s is not None:
            begun, loaded = (min(ended.sent_at + at, scheduled) for at in ended.done.load_interval_s)
            yield "load", begun, loaded
        if first is not None:
            yield "prefill", scheduled, first
    if first is not None:
        yield "decode", first, ended.ended_at


@contextlib.contextmanager
def open_provider(endpoint: str) -> Iterator[TracerProvider]:
    """Opens what sends spans to a collector, from a thread of its own; sends the last ones at the end.

    The SDK reads its own environment variables, such as ``OTEL_SERVICE_NAME`` and ``OTEL_TRACES_SAMPLER``.

    Args:
        endpoint: the collector's URL for OTLP over HTTP.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            "otlp_traces_endpoint needs OpenTelemetry; install radixkv[otel], or leave out --otlp-traces-endpoint"
        ) from None
    resource = Resource({SERVICE_NAME: "radixkv"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=_EXPORT_TIMEOUT_S)))
    try:
        yield provider
    finally:
        provider.force_flush(int(_EXPORT_TIMEOUT_S * 1000))
        provider.shutdown()
