"""The Grafana dashboard and the Prometheus alerts in deploy/, against the metrics of a server."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from support.paths import ROOT
from support.promql import parse, unknown_names
from support.scripted_runtime import (
    ADAPTERS,
    DISK,
    DRAFTS,
    HOST,
    PAUSES,
    REPLICAS,
    SHARED_STORE,
    STATES,
    TENANTS,
    WINDOWS,
    Site,
)

DASHBOARD = json.loads((ROOT / "deploy/grafana/radixkv.json").read_text())
RULES = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
SCRAPED = {"job": "radixkv", "instance": "127.0.0.1:8000"}
"""Labels that Prometheus adds to every series."""

Series = dict[str, list[dict[str, str]]]


@pytest.fixture
def series(site: Site) -> Series:
    """Returns by metric the labels of all series, also of what few servers have."""
    site.loop.host = HOST
    site.loop.tenants, site.loop.drafts, site.loop.replicas = TENANTS, DRAFTS, REPLICAS
    site.loop.states, site.loop.windows = STATES, WINDOWS
    site.loop.pauses, site.loop.adapters = PAUSES, ADAPTERS
    series: Series = defaultdict(list, {"up": [SCRAPED]})
    for disk, shared_store in ((None, SHARED_STORE), (DISK, None), (DISK, SHARED_STORE)):
        site.loop.disk, site.loop.shared_store = disk, shared_store
        for family in text_string_to_metric_families(site.http.get("/metrics").text):
            for sample in family.samples:
                if (labels := sample.labels | SCRAPED) not in series[sample.name]:
                    series[sample.name].append(labels)
    return dict(series)


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def targets() -> Iterator[tuple[str, str]]:
    """Yields the expression of each query of the dashboard, and its legend."""
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def test_the_dashboard_asks_only_for_what_a_server_has(series: Series) -> None:
    for text, legend in targets():
        expression = parse(text)
        assert not unknown_names(expression, series), text
        assert set(re.findall(r"{{(\w+)}}", legend)) <= expression.grouped, text


def test_alerts_ask_only_for_what_a_server_has(series: Series) -> None:
    for rule in rules():
        assert not unknown_names(parse(rule["expr"]), series), rule["expr"]


def test_the_dashboard_shows_every_metric(series: Series) -> None:
    shown = {selector.metric for text, _ in targets() for selector in parse(text).selectors}
    families = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in series}
    assert families == {name.removesuffix("_bucket") for name in shown}


def test_the_dashboard_can_be_imported() -> None:
    """By Grafana's model of dashboards: unique ids, panels that do not overlap, sources that are a variable."""
    assert DASHBOARD["id"] is None
    assert DASHBOARD["schemaVersion"] >= 39
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & own, panel["title"]
        cells |= own
    for panel in panels():
        assert panel["title"]
        assert panel["description"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"])))
    assert used == {*variables, "__rate_interval"}


def test_alerts_have_the_form_of_rules() -> None:
    assert [*RULES] == ["groups"]
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[mh]", rule.get("for", "0m"))
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description"}
        variables = {
            name for text in rule["annotations"].values() for name in re.findall(r"{{ \$(\S+)(?: \|.*?)? }}", text)
        }
        assert variables <= {"value", "labels.instance"}


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("sum by (place) (rate(a_total[5m]))", ["place"]),
        ('rate(a_total{reason="odd"}[5m]) / b', ["a_total{reason=odd}"]),
        ('b{reason=~"x"}', ["b{reason=~x}"]),
        ("a_total and c unless d > 0.5", ["c", "d"]),
        ('sum by (reason) (rate(a_total{reason="x"}[5m])) or vector(0)', []),
    ],
)
def test_names_that_no_server_has_are_found(text: str, unknown: list[str]) -> None:
    assert unknown_names(parse(text), {"a_total": [{"reason": "x"}], "b": [{}]}) == unknown


@pytest.mark.parametrize("text", ["rat(a[5m])", "rate(a[5 minutes])", "sum(a", 'a{b="c"', "a ; b"])
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=".*"):
        parse(text)
