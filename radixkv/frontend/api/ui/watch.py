"""What ``/cache/tree`` shows, asked of the runtime once for all who look."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from radixkv.errors import RequestError
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.errors import RuntimeRestarting
from radixkv.frontend.http.sse import EVENT_END, EVENT_START, typed_event
from radixkv.frontend.pause_report import pause_fields
from radixkv.frontend.served_model import ServedModel
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.cache_messages import Outlined, TierOutline, TreeNode
from radixkv.wire.messages import unpack_tokens
from radixkv.wire.stats import Stats

INTERVAL_S = 1.0
"""Seconds between two questions to the runtime, at least, and between the events of a stream."""
_EARLY_S = 0.01
"""An event loop may wake a stream too early by this; the stream gets a new answer then, too."""


class CacheWatch:
    """Asks the runtime for outline and counters while someone looks, and gives all the same answer.

    There is no task of its own: whoever needs an answer and finds none that is new asks, while the others wait.

    Args:
        client: of the runtime.
        served_model: its tokenizer gives the texts of nodes.
        contents: whether to show tokens of clients.
        interval_s: how old an answer may get, and the time between the events of a stream.
    """

    def __init__(
        self, client: EngineClient, served_model: ServedModel, *, contents: bool, interval_s: float = INTERVAL_S
    ) -> None:
        self._client = client
        self._served_model = served_model
        self._contents = contents
        self._interval_s = interval_s
        self._asking = asyncio.Lock()
        self._snapshot = b""
        self._asked_at = float("-inf")

    async def snapshot(self) -> bytes:
        """Returns the JSON object of ``/cache/tree``, at most ``interval_s`` old. Raises ``RequestError``."""
        async with self._asking:
            now = time.monotonic()
            if now - self._asked_at >= self._interval_s - _EARLY_S:
                outlined, stats = await asyncio.gather(
                    self._client.outline(contents=self._contents), self._client.stats()
                )
                self._snapshot, self._asked_at = msgspec.json.encode(self._fields(outlined, stats)), now
            return self._snapshot

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields a server-sent event with each snapshot, until the server shuts down. Raises ``RequestError``.

        While the runtime is started again, there are events of the type ``restarting`` instead.
        """
        while self._client.refusal is None or self._is_restarting:
            try:
                event = EVENT_START + await self.snapshot() + EVENT_END
            except RequestError:
                if not self._is_restarting:
                    raise
                event = typed_event({"type": "restarting", "message": str(self._client.refusal)})
            yield event
            await asyncio.sleep(self._interval_s)

    @property
    def _is_restarting(self) -> bool:
        return isinstance(self._client.refusal, RuntimeRestarting)

    def _fields(self, outlined: Outlined, stats: Stats) -> dict[str, Any]:
        ready, tokenizer = self._served_model.ready, self._served_model.tokenizer
        tiers: dict[str, Any] = {
            "device": _tree_fields(outlined.device, tokenizer)
            | {
                "capacity": stats.n_pages,
                "free": stats.n_pages_free,
                "evictable": stats.n_pages_evictable,
                "pinned": stats.n_pages_pinned,
            }
        }
        if stats.host is not None and outlined.host is not None:
            tiers["host"] = _tree_fields(outlined.host, tokenizer) | {
                "capacity": stats.host.n_slots,
                "free": stats.host.n_slots_free,
                "pinned": stats.host.n_slots_pinned,
            }
        if stores := [one for one in (stats.disk, stats.shared_store) if one is not None]:
            n_pages, n_bytes = sum(one.n_pages for one in stores), sum(one.n_bytes for one in stores)
            tiers["storage"] = {"pages": n_pages, "bytes": n_bytes}
        totals = {
            "prefix_queries": stats.prefix_queries_total,
            "prefix_hits": stats.cache_use.n_cached,
            "generation_tokens": stats.generation_tokens_total,
            "pages_evicted": stats.pages_evicted_total,
            "preemptions": stats.preemptions_total,
        }
        if stats.drafts is not None:
            totals["draft_tokens"] = stats.drafts.draft_tokens_total
            totals["accepted_tokens"] = stats.drafts.accepted_tokens_total
        if stats.states is not None:
            tiers["device"]["states"] = {"capacity": stats.states.n_slots, "free": stats.states.n_slots_free}
            totals["state_hits"] = stats.states.hits_total
            totals["states_evicted"] = stats.states.evicted_total
        if stats.windows is not None:
            totals["tail_hits"] = stats.windows.hits_total
            totals["tails_evicted"] = stats.windows.evicted_total
        return {
            "model": self._served_model.name,
            "time": time.time(),
            "page_size": ready.page_size,
            "has_contents": self._contents,
            "load": {"running": stats.n_running, "waiting": stats.n_waiting, "max_running": ready.max_num_seqs},
            "totals": totals,
            "tiers": tiers,
            **({} if outlined.joint is None else {"joint": _tree_fields(outlined.joint, tokenizer)}),
            **({} if stats.pauses is None else {"pauses": pause_fields(stats.pauses)}),
        }


def _tree_fields(outline: TierOutline, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {
        "pages": outline.n_pages,
        "pages_not_visited": outline.n_not_visited,
        "more": outline.n_more_roots,
        "more_pages": outline.n_more_root_pages,
        "nodes": [_node_fields(node, tokenizer) for node in outline.nodes],
    }


def _node_fields(node: TreeNode, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns a node's fields, without those that are zero, false or empty."""
    fields: dict[str, Any] = {
        "id": node.serial,
        "parent": node.parent,
        "own_pages": node.n_own_pages,
        "pages": node.n_pages,
        "age": node.age,
    }
    if node.idle_s is not None:
        fields["idle_seconds"] = round(node.idle_s, 1)
    if node.tiers:
        fields["tiers"] = node.tiers
    if node.parent < 0:
        fields["namespace"] = node.namespace
    if node.replica is not None:
        fields["replica"] = node.replica
    if node.tokens:
        ids = unpack_tokens(node.tokens)
        fields["starts_with"] = ids if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
    optional = {
        "leases": node.n_leases,
        "hits": node.n_hits,
        "is_pinned": node.is_pinned,
        "has_state": node.has_state,
        "more": node.n_more,
        "more_pages": node.n_more_pages,
    }
    return fields | {name: value for name, value in optional.items() if value}
