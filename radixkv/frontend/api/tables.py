"""The route ``/cache/tables``: the block tables of running requests."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixkv.errors import InvalidRequest, shortened
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.served_model import ServedModel
from radixkv.wire.table_messages import ChoiceTable, PoolUse, RequestTables, TablePage

MAX_ENTRY = 1 << 31
"""Entries of block tables are less."""

_PARAMETERS = [
    {"name": "request", "in": "query", "required": False, "schema": {"type": "string", "minLength": 1}},
    {
        "name": "first",
        "in": "query",
        "required": False,
        "schema": {"type": "integer", "minimum": 0, "maximum": MAX_ENTRY - 1},
    },
]


def add_tables_route(app: DocumentedApp, client: EngineClient, served_model: ServedModel) -> None:
    """Adds the route ``/cache/tables``."""

    @app.get("/cache/tables", openapi_extra={"parameters": _PARAMETERS})
    async def tables(request: Request) -> Response:
        """How many pages each running request has, shared and own; with ?request=ID, its block table."""
        name = request.query_params.get("request")
        if name == "":
            raise InvalidRequest(
                "request is empty; give the id of a running request, or leave it out", param="request"
            )
        first = _entry(request.query_params.get("first", "0"))
        tabled = await client.tables(name or "", first)
        fields = {
            "page_size": served_model.ready.page_size,
            "pool": _pool_fields(tabled.pool),
            "requests": [_request_fields(one, with_table=name is not None) for one in tabled.requests],
            "more": tabled.n_more,
        }
        return Response(msgspec.json.encode(fields), media_type="application/json")


def _entry(text: str) -> int:
    """Returns the index of an entry of a block table."""
    if not (text.isascii() and text.isdecimal() and len(text) < 11 and int(text) < MAX_ENTRY):
        raise InvalidRequest(
            f"first is {shortened(text)}; give the first entry of the block table to show, a number from 0 on",
            param="first",
        )
    return int(text)


def _pool_fields(pool: PoolUse) -> dict[str, Any]:
    fields = {
        "pages": pool.n_pages,
        "free": pool.n_free,
        "cached": pool.n_cached,
        "leased": pool.n_leased,
        "own": pool.n_own,
    }
    optional = {"copied": pool.n_copied, "windows": pool.n_replaced}
    return fields | {name: count for name, count in optional.items() if count}


def _request_fields(tables: RequestTables, *, with_table: bool) -> dict[str, Any]:
    """Returns the JSON object of a request, without fields that do not apply."""
    fields: dict[str, Any] = {"id": tables.id}
    optional = {"request_id": tables.request_id, "tenant": tables.tenant}
    fields |= {name: value for name, value in optional.items() if value}
    if tables.replica is not None:
        fields["replica"] = tables.replica
    return fields | {"choices": [_choice_fields(choice, with_table=with_table) for choice in tables.choices]}


def _choice_fields(table: ChoiceTable, *, with_table: bool) -> dict[str, Any]:
    tiers = Counter[str](device=table.n_in_tree + table.n_own)
    if table.loading_from is not None:
        tiers[table.loading_from] += table.n_loading
    fields: dict[str, Any] = {
        "index": table.choice,
        "phase": table.phase,
        "prompt_tokens": table.n_prompt,
        "tokens": table.n_known,
        "stored_tokens": table.n_stored,
        "pages": table.n_pages,
        "in_tree": table.n_in_tree,
        "shared": table.n_shared,
        "own": table.n_own,
        "tiers": tiers,
    }
    optional = {
        "skipped": table.n_skipped,
        "loading": table.n_loading,
        "loading_from": table.loading_from,
        "waits_for": waits_for(table),
        "freed": table.n_freed,
        "window_pages": table.n_window_pages,
        "replaced": table.n_replaced,
    }
    fields |= {name: value for name, value in optional.items() if value}
    if table.batch_slot is not None:
        fields["batch_slot"] = table.batch_slot
    return fields | ({"table": [_page_fields(page) for page in table.pages]} if with_table else {})


def waits_for(table: ChoiceTable) -> str | None:
    """Returns what a loading choice waits for, to be read after "it waits for"; None if it does not load."""
    pages = "pages"
    if table.n_loading:
        pages = f"{table.n_loading:,} page{'' if table.n_loading == 1 else 's'}"
    match table.load_stage:
        case "lookup":
            return "the shared store to say which pages of the prompt it has"
        case "fetch":
            return f"{pages} to be read from disk or the shared store into the host tier"
        case "copy":
            source = "the host tier" if table.loading_from == "host" else "shared memory"
            return f"{pages} to be copied from {source} to the device"
        case "copied":
            return "its turn: the pages that it has waited for are on the device"
        case None:
            return None


def _page_fields(page: TablePage) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "logical": page.entry,
        "physical": page.page,
        "filled": page.n_filled,
        "kind": page.kind,
        "references": page.n_refs,
        "tier": page.tier,
    }
    optional = {"slot": page.slot, "window_page": page.window_page, "state_slot": page.state_slot}
    return fields | {name: number for name, number in optional.items() if number is not None}
