"""What clients see of the tiers: usage, metrics and settings of a server whose runtime has one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from radixkv.frontend.served_model import ServedModel
from support.running_site import running_site, site_fixture
from support.scripted_runtime import DISK, HOST, ScriptedLoop, Site
from support.site_requests import events, post

DETAILS = {"cached_tokens_details": {"device": 1, "host": 1}}


host_site = site_fixture(ready=ScriptedLoop(host=HOST).ready)


@pytest.fixture
def tiered(host_site: Site) -> Site:
    host_site.loop.host = HOST
    return host_site


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ],
)
def test_usage_says_which_tier_the_cached_tokens_came_from(tiered: Site, path: str, prompt: dict[str, Any]) -> None:
    usage = post(tiered, path, **prompt, max_tokens=2)["usage"]["prompt_tokens_details"]
    n_cached = usage["cached_tokens"]
    assert usage["cached_tokens_details"] == {"device": n_cached - 1, "host": 1}
    chunks = events(tiered, path, **prompt, max_tokens=2, stream_options={"include_usage": True})
    assert chunks[-1]["usage"]["prompt_tokens_details"] == usage


def test_usage_of_several_prompts_is_their_sum(tiered: Site) -> None:
    usage = post(tiered, "/v1/completions", prompt=["hello", "good bye"], max_tokens=2)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 6, "cached_tokens_details": {"device": 4, "host": 2}}


def test_sglangs_fields_are_those_of_usage(tiered: Site) -> None:
    body = {"prompt": "hello", "max_tokens": 2, "return_cached_tokens_details": True}
    assert post(tiered, "/v1/completions", **body)["sglext"] == DETAILS
    meta = post(tiered, "/generate", text="hello", sampling_params={"max_new_tokens": 2})["meta_info"]
    assert meta["cached_tokens"] == 2
    assert {"cached_tokens_details": meta["cached_tokens_details"]} == DETAILS


def test_server_info_has_the_tiers_counters(tiered: Site) -> None:
    (state,) = tiered.http.get("/server_info").json()["internal_states"]
    assert state["host"] == msgspec.to_builtins(HOST) | {"prefix_hits_total": 30}
    assert not {"id", "type"} & state.keys()


def test_a_disk_tier_is_a_source_of_its_own(
    served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ready = msgspec.structs.replace(served_model.ready, n_host_slots=HOST.n_slots, has_disk=True)
    with running_site(replace(served_model, ready=ready), tmp_path_factory.mktemp("s")) as site:
        site.loop.host, site.loop.disk = HOST, DISK
        usage = post(site, "/v1/completions", prompt="hello", max_tokens=2)["usage"]["prompt_tokens_details"]
        assert usage == {"cached_tokens": 2, "cached_tokens_details": {"device": 1, "host": 0, "storage": 1}}
        meta = post(site, "/generate", text="hello", sampling_params={"max_new_tokens": 2})["meta_info"]
        assert meta["cached_tokens_details"] == usage["cached_tokens_details"]
        (state,) = site.http.get("/server_info").json()["internal_states"]
        assert state["disk"] == msgspec.to_builtins(DISK) | {"prefix_hits_total": 20}
