"""Traces of requests, read back from OpenTelemetry's SDK."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from radixkv.frontend.metrics.traces import RequestTraces
from support.live import LIMIT_S
from support.scripted_runtime import DISK, FAILS_AFTER_THREE, HOST, Site

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Spans:
    """Takes the spans of requests."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def take(self) -> tuple[ReadableSpan, dict[str, ReadableSpan]]:
        """Waits for the span of one request; returns it, and its children by name."""
        limit = time.monotonic() + LIMIT_S
        while time.monotonic() < limit:
            spans = self.exporter.get_finished_spans()
            roots = [span for span in spans if span.kind is SpanKind.SERVER]
            if roots:
                (root,) = roots
                children = [span for span in spans if span is not root]
                assert all(span.parent == root.context for span in children)
                self.exporter.clear()
                return root, {span.name: span for span in children}
            time.sleep(0.005)
        raise AssertionError("no span came")


@pytest.fixture
def spans(site: Site) -> Iterator[Spans]:
    spans = Spans()
    site.client.on_end.append(RequestTraces("echo", spans.provider).add)
    yield spans
    site.client.on_end.clear()
    spans.provider.shutdown()


def post(site: Site, headers: dict[str, str] | None = None, **body: Any) -> Any:
    return site.http.post("/v1/completions", json=body, headers=headers)


def test_a_request_has_a_span_with_its_phases(site: Site, spans: Spans) -> None:
    site.loop.host = HOST
    site.loop.disk = DISK
    site.loop.step_s = 0.2  # the scripted time in the queue is 0.25 s
    before = time.time_ns()
    headers = {"X-Request-Id": "order-17"}
    reply = post(site, headers, prompt=list(range(10, 20)), max_tokens=4, temperature=0.5, top_p=0.25).json()
    after = time.time_ns()
    root, children = spans.take()
    assert root.name == "llm_request"
    assert root.parent is None
    phases = [children[name] for name in ("queue", "prefill", "decode")]
    load = children["load"]
    assert len(children) == 4
    assert round((load.start_time - phases[0].start_time) / 1e9, 3) == 0.05
    assert round((load.end_time - load.start_time) / 1e9, 3) == 0.15
    times = [at for span in phases for at in (span.start_time, span.end_time)]
    assert times == sorted(times), "one after the other"
    assert before <= root.start_time <= times[0] < times[-1] == root.end_time <= after
    attributes = dict(root.attributes)
    assert 0 < attributes.pop("gen_ai.latency.time_to_first_token") < attributes.pop("gen_ai.latency.e2e")
    assert attributes == {
        "http.route": "/v1/completions",
        "http.response.header.x-request-id": ("order-17",),
        "gen_ai.response.model": "echo",
        "gen_ai.request.id": reply["id"].removeprefix("cmpl-"),
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.usage.prompt_tokens": 10,
        "gen_ai.usage.completion_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 5,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.response.finish_reasons": ("length",),
        "radixkv.cached_tokens.device": 4,
        "radixkv.cached_tokens.host": 0,
        "radixkv.cached_tokens.storage": 1,
        "radixkv.priority": 0,
    }


def test_a_request_continues_the_trace_of_its_client(site: Site, spans: Spans) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=7"}
    post(site, headers, prompt=[1], max_tokens=1)
    root, children = spans.take()
    assert root.parent is not None
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)
    assert root.context.trace_state["vendor"] == "7"
    assert {span.context.trace_id for span in children.values()} == {root.context.trace_id}


def test_a_malformed_parent_begins_a_trace(site: Site, spans: Spans) -> None:
    assert post(site, {"traceparent": "00-xyz"}, prompt=[1], max_tokens=1).status_code == 200
    assert spans.take()[0].parent is None


def test_a_client_that_does_not_sample_has_no_spans(site: Site, spans: Spans) -> None:
    post(site, {"traceparent": f"00-{TRACE}-{PARENT}-00"}, prompt=[1], max_tokens=1)
    post(site, prompt=[1], max_tokens=1)
    assert f"{spans.take()[0].context.trace_id:032x}" != TRACE


def test_a_failed_request_has_the_code_of_its_error(site: Site, spans: Spans) -> None:
    post(site, prompt=[FAILS_AFTER_THREE, 1], max_tokens=9)
    root, children = spans.take()
    assert not root.status.is_ok
    assert root.attributes["error.type"] == root.status.description == "numerical_error"
    assert [*children] == ["decode"], "the time in the queue is told at the end only"


def test_a_client_that_leaves_is_named(site: Site, spans: Spans) -> None:
    site.loop.step_s = 0.01
    body = {"prompt": [1, 2, 3], "max_tokens": 400, "stream": True}
    with site.http.stream("POST", "/v1/completions", json=body) as reply:
        next(reply.iter_lines())
    root, _ = spans.take()
    assert root.attributes["radixkv.client_disconnected"]
    assert "gen_ai.response.finish_reasons" not in root.attributes
