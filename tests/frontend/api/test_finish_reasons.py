"""``/metrics`` counts answers by the finish reason that their clients saw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.scripted_runtime import EOS, FAILS_AFTER_THREE, FAILS_AT_ONCE, Site


def counts(site: Site) -> dict[str, float]:
    families = text_string_to_metric_families(site.http.get("/metrics").text)
    return {
        sample.labels["finish_reason"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "radixkv:requests_total"
    }


@contextmanager
def counted(site: Site, **expected: int) -> Iterator[None]:
    """Checks the change of the counters inside the context."""
    before = counts(site)
    yield
    site.call(site.client.idle())
    after = counts(site)
    assert {
        reason: after[reason] - before[reason] for reason in after if after[reason] != before[reason]
    } == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "abc", "max_tokens": 2}, {"length": 1}),
        ({"prompt": [70, EOS]}, {"stop": 1}),
        ({"prompt": "abcdef", "stop": "cd"}, {"stop": 1}),
        ({"prompt": ["abcdef", "xyz"], "n": 2, "stop": "cd", "max_tokens": 8}, {"stop": 2, "length": 2}),
        ({"prompt": "abc", "echo": True, "max_tokens": 0}, {"length": 1}),
        ({"prompt": [FAILS_AT_ONCE]}, {"error": 1}),
        ({"prompt": [[65], [FAILS_AFTER_THREE]], "max_tokens": 2}, {"length": 2}),
        ({"prompt": [FAILS_AFTER_THREE], "max_tokens": 9, "n": 2}, {"error": 2}),
        ({"prompt": "abc", "temperature": -1}, {}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_each_answer_is_counted_once(
    site: Site, body: dict[str, Any], expected: dict[str, int], stream: bool
) -> None:
    with counted(site, **expected):
        assert site.http.post("/v1/completions", json={**body, "stream": stream}).read()


@pytest.mark.parametrize("stream", [False, True])
def test_each_answer_of_generate_is_counted_once(site: Site, stream: bool) -> None:
    with counted(site, stop=1, length=1):
        settings = [{"stop": "cd", "max_new_tokens": 9}, {"max_new_tokens": 3}]
        body = {"text": ["abcdef", "abc"], "sampling_params": settings, "stream": stream}
        assert site.http.post("/generate", json=body).status_code == 200


def test_an_answer_whose_client_leaves_counts_as_aborted(site: Site) -> None:
    with counted(site, abort=1):
        site.loop.is_held = True
        with pytest.raises(httpx.ReadTimeout):
            site.http.post("/v1/completions", json={"prompt": "abc"}, timeout=0.2)
        site.call(site.client.idle())


def test_a_health_check_counts_as_an_answer(site: Site) -> None:
    with counted(site, length=1):
        site.http.get("/health_generate")
