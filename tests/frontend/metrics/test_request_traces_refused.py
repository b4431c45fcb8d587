"""Traces that cannot be sent: without OpenTelemetry, or without a collector's URL."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from radixkv.errors import ConfigError
from radixkv.frontend.metrics.traces import open_provider
from radixkv.settings.server_config import ServerConfig

ENDPOINT = "http://127.0.0.1:4318/v1/traces"


def test_without_opentelemetry_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"radixkv\[otel\]"), open_provider(ENDPOINT):
        pass


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:4317", "grpc://127.0.0.1:4317", "http://", "http:///v1", 7])
def test_what_is_no_url_of_http_is_refused(endpoint: Any) -> None:
    assert ServerConfig(otlp_traces_endpoint=ENDPOINT).otlp_traces_endpoint == ENDPOINT
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        ServerConfig(otlp_traces_endpoint=endpoint)
