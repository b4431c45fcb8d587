"""Tests of docs/server.md against the code."""

from __future__ import annotations

import re

from fastapi import FastAPI
from starlette.routing import Route

from radixkv.cli.serve import add as add_serve
from radixkv.errors import RequestError
from radixkv.frontend.api.openai.schema import ChatRequest, CompletionRequest, StreamOptions
from radixkv.frontend.api.sglang.schema import DEFAULT_MAX_NEW_TOKENS, GenerateRequest, SamplingFields
from radixkv.frontend.chat import MAX_MESSAGES
from radixkv.frontend.http import errors as failure
from radixkv.frontend.http.body_decoder import MAX_KEYS, MAX_MARKS, MAX_PROMPTS
from radixkv.frontend.served_model import ServedModel
from radixkv.frontend.shared_fields import PromptCacheOptions
from radixkv.settings.arguments import Parser
from radixkv.settings.compat import Place, refusals
from radixkv.settings.config import SchedulerConfig
from radixkv.settings.server_config import ServerConfig
from radixkv.wire.request_limits import MAX_SALT_BYTES
from radixkv.wire.sampling import (
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from radixkv.wire.stats import AdapterStats
from support.paths import ROOT
from support.running_site import make_app
from support.scripted_runtime import DISK, DRAFTS, HOST, REPLICAS, SHARED_STORE, STATES, TENANTS, WINDOWS, Site

TEXT = (ROOT / "docs" / "server.md").read_text()


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def names(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def test_every_path_is_documented_with_its_methods(site: Site, served_model: ServedModel) -> None:
    app = make_app(site.client, served_model)
    assert isinstance(app, FastAPI)
    routes = {route.path: route.methods for route in app.routes if isinstance(route, Route)}
    supported = {path.replace(":path}", "}"): routes[path] for path in routes.keys() - refusals(Place.ROUTE).keys()}
    rows = re.findall(r"^\| (`/.*?) \| (.*?) \|", section("Paths"), re.M)
    documented = {
        path: set(re.findall(r"[A-Z]{3,}", methods if path == "/ping" else methods.partition(";")[0]))
        for cell, methods in rows
        for path in re.findall(r"`(/[^`]*)`", cell)
    }
    assert documented == supported
    for path, methods in documented.items():
        reply = site.http.request("DELETE", path.replace("{name}", "echo"))
        assert (reply.status_code, set(reply.headers["allow"].split(", "))) == (405, methods), path


def test_every_supported_field_is_documented_and_no_other() -> None:
    unsupported = {*refusals(Place.COMPLETIONS), *refusals(Place.CHATS), *refusals(Place.GENERATE)}
    text = section("Requests")
    openai = {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}
    assert openai <= names(text)
    refused = names(text.partition("asks for nothing:")[2].partition("\n\n")[0])
    assert refused <= unsupported
    sglang = names(text.partition("`/generate` has these")[2])
    assert sglang <= {*GenerateRequest.__struct_fields__, *SamplingFields.__struct_fields__, *unsupported}
    options = {*StreamOptions.__struct_fields__, *PromptCacheOptions.__struct_fields__}
    assert names(text) <= {*openai, *unsupported, *sglang, *options, "text"}


def test_limits_and_defaults_equal_those_of_the_code() -> None:
    text = " ".join(TEXT.split())
    for shown in (
        f"| {SamplingParams().max_tokens}; of a chat the rest",
        f"at most {MAX_CHOICES}, which share",
        f"at most {MAX_LOGIT_BIASES} token ids",
        f"at most {MAX_STOP_STRINGS} texts of {MAX_STOP_CHARACTERS} characters, {MAX_STOP_TOKEN_IDS} ids",
        f"at most {MAX_LOGPROBS} a token",
        f"at most {MAX_SALT_BYTES} bytes",
        f"lists of them; at most {MAX_PROMPTS})",
        f"at most {MAX_MESSAGES:,})",
        f"at most {MAX_KEYS:,} keys in all",
        f"messages of a chat at most {MAX_MARKS:,} brackets and commas",
        f"`max_new_tokens` ({DEFAULT_MAX_NEW_TOKENS};",
        f"`--max-body-bytes`, {ServerConfig().max_body_bytes >> 20} MiB",
        f"`--max-queued-requests` ({SchedulerConfig().max_queued_requests:,})",
        f"`--stats-interval` seconds ({ServerConfig().stats_interval_s:g})",
        f"`--heartbeat-timeout` seconds ({ServerConfig().heartbeat_timeout_s:g})",
    ):
        assert shown in text


def test_every_error_code_is_documented_with_its_status() -> None:
    documented = {
        code: int(status)
        for status, cell in re.findall(r"^\| (\d+) \| (.*) \|$", section("Errors"), re.M)
        for code in re.findall(r"`([a-z_]+)`", cell)
    }
    assert documented == {
        error.code: failure.status_of(error("")) for error in (RequestError, *_below(RequestError))
    }


def _below(kind: type[RequestError]) -> list[type[RequestError]]:
    return [each for direct in kind.__subclasses__() for each in (direct, *_below(direct))]


def test_every_metric_is_documented(site: Site) -> None:
    site.loop.host = HOST
    site.loop.tenants = TENANTS
    site.loop.drafts = DRAFTS
    site.loop.states, site.loop.windows = STATES, WINDOWS
    site.loop.replicas = REPLICAS
    site.loop.adapters = AdapterStats(2, 1000, n_in_slots=1)
    types = []
    for disk, shared_store in ((DISK, None), (None, SHARED_STORE), (DISK, SHARED_STORE)):
        site.loop.disk, site.loop.shared_store = disk, shared_store
        types += re.findall(r"^# TYPE radixkv:(\w+) (\w+)$", site.http.get("/metrics").text, re.M)
    shown = {name for name, _ in types if not name.endswith("_created")}
    assert names(section("Metrics")) - {"sglang"} == shown


def test_every_documented_flag_exists() -> None:
    parser = Parser(prog="radixkv")
    commands = parser.add_subparsers(parser_class=Parser)
    add_serve(commands, "")
    known = commands.choices["serve"].format_help()
    for flag in set(re.findall(r"--[a-z][a-z-]+", TEXT)):
        assert flag in known
