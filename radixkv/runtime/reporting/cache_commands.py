"""Answers the messages that look at the cache or change it on a client's behalf."""

from __future__ import annotations

import os
from hashlib import blake2b
from operator import itemgetter
from typing import NamedTuple

from radixkv.errors import RequestError, SessionNotFound, shortened
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.intake import Intake
from radixkv.runtime.lifetimes.pins import Pins
from radixkv.runtime.lifetimes.sessions import Sessions
from radixkv.runtime.reporting.stats import count_requests, count_requests_of
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.structured.gate import GrammarGate
from radixkv.runtime.tiers.transfers import Transfers
from radixkv.settings.limits import check_prefix, check_ttl
from radixkv.settings.tenants import OPERATOR
from radixkv.tree.joint import JointRun, joint_roots
from radixkv.tree.node import TOKEN_BYTES, Namespace, Node
from radixkv.tree.outline import Outline as TreeOutline
from radixkv.tree.outline import OutlinedNode, RunT
from radixkv.tree.outline import outline as make_outline
from radixkv.tree.radix_tree import RadixTree
from radixkv.wire.cache_messages import (
    CacheCommand,
    CacheReply,
    CloseSession,
    Explain,
    Explained,
    Flush,
    Flushed,
    Invalidate,
    Invalidated,
    Match,
    Matched,
    Outline,
    Outlined,
    Pin,
    Pinned,
    SessionClosed,
    Tier,
    TierMatch,
    TierOutline,
    TreeNode,
)
from radixkv.wire.messages import Failed, unpack_tokens

MAX_OUTLINED_NODES = 400
"""Nodes of an ``Outlined``, in all tiers together. The joint tree has as many more."""
MAX_VISITED_NODES = 800
"""Nodes that an ``Outline`` looks at, in all tiers together: which takes about a millisecond of the loop. The joint
tree takes as much again."""
MAX_SHOWN_TOKENS = 12
"""Tokens of a node in an ``Outlined``."""


class CacheCommands:
    """Carries out the messages that look at the cache or change it, on the device and in the tiers behind it.

    Args:
        cache: the device's page cache.
        intake: checks prompts and salts.
        scheduler: drops prefixes from all tiers.
        transfers: copy pages to and from the host tier; None without one.
        pins: of both caches.
        sessions: which may be closed.
        gate: the requests that wait before those of the scheduler.
    """

    def __init__(
        self,
        cache: PageCache,
        intake: Intake,
        scheduler: Scheduler,
        transfers: Transfers | None,
        pins: Pins,
        sessions: Sessions,
        gate: GrammarGate,
    ) -> None:
        self._cache = cache
        self._intake = intake
        self._scheduler = scheduler
        self._transfers = transfers
        self._pins = pins
        self._sessions = sessions
        self._gate = gate
        self._label_key = os.urandom(16)

    def run(self, message: CacheCommand) -> CacheReply | Failed:
        """Carries out a message; returns its answer.

        O(tokens) for ``Explain``, ``Match`` and ``Pin``, O(``MAX_VISITED_NODES``) for ``Outline``, else O(pages).
        """
        try:
            match message:
                case Flush():
                    return self._flush(message)
                case Invalidate():
                    return self._invalidate(message)
                case CloseSession():
                    return self._close_session(message)
                case Explain():
                    return self._explain(message)
                case Match():
                    return self._match(message)
                case Outline():
                    return self._outline(message)
                case Pin():
                    return self._pin(message)
        except RequestError as error:
            return Failed(message.id, error.code, str(error), error.param)

    def _flush(self, message: Flush) -> Flushed:
        self._pins.clear()
        if self._transfers is not None:
            self._transfers.flush()
        n_freed, n_leased = self._cache.flush()
        return Flushed(message.id, n_freed, n_leased)

    def _invalidate(self, message: Invalidate) -> Invalidated:
        self._intake.check_owns_cache(message.tenant)
        namespace, page_size = self._intake.namespace(message.tenant, message.cache_salt), self._cache.page_size
        n_tokens = len(message.tokens) // TOKEN_BYTES
        if message.tokens:
            self._intake.check_prompt(message.tokens)
            check_prefix(n_tokens, page_size)
        whole_pages = message.tokens[: (n_tokens - n_tokens % page_size) * TOKEN_BYTES]
        dropped = self._scheduler.invalidate(namespace, whole_pages, message.lowest_tier)
        transfers = self._transfers
        return Invalidated(
            id=message.id,
            n_on_device=dropped.n_on_device,
            n_held=dropped.n_held,
            n_in_host=None if transfers is None else dropped.n_in_host,
            n_on_disk=None if transfers is None or transfers.disk is None else dropped.n_on_disk,
        )

    def _close_session(self, message: CloseSession) -> SessionClosed:
        namespace = self._intake.namespace(message.tenant, message.cache_salt)
        demoted = self._sessions.close(namespace, message.session_id)
        if demoted is None:
            raise SessionNotFound(
                f"there is no session {shortened(message.session_id)} with this cache_salt: no request had its id, "
                "or it was closed, or forgotten for many newer ones",
                param="session_id",
            )
        n_on_device, n_in_host = demoted
        return SessionClosed(message.id, n_on_device, None if self._transfers is None else n_in_host)

    def _explain(self, message: Explain) -> Explained:
        self._intake.check_prompt(message.tokens)
        namespace = self._intake.namespace(message.tenant, message.cache_salt)
        n_tokens = len(message.tokens) // TOKEN_BYTES
        hits = _TierHits() if self._transfers is None else _look(self._transfers, namespace, message.tokens)
        if message.tenant != OPERATOR:
            hits = hits._replace(min_loaded_tokens=None)
        cache = self._transfers.host if self._transfers is not None and hits.is_loaded else self._cache
        explanation = cache.tree.explain(namespace, message.tokens, contents=message.contents)
        pinned = self._pins.find(namespace, message.tokens)
        n_cached = min(explanation.n_tokens, n_tokens - 1)  # a request computes at least one prompt token
        n_copied = min(explanation.n_partial, n_tokens - 1 - n_cached)
        if n_copied >= self._cache.min_copied_tokens and not hits.is_loaded:  # loads bring whole pages only
            n_cached += n_copied
        position, token = explanation.first_difference, None
        if position is not None:
            (token,) = unpack_tokens(message.tokens[position * TOKEN_BYTES : (position + 1) * TOKEN_BYTES])
        return Explained(
            id=message.id,
            n_tokens=n_tokens,
            n_cached=n_cached,
            reason=explanation.reason,
            first_difference=position,
            token=token,
            cached_token=explanation.cached_token,
            n_cached_elsewhere=explanation.n_tokens_elsewhere,
            is_demoted=cache.tree.demotions.reach_end(namespace, message.tokens),
            n_pinned=pinned.n_tokens,
            pin_seconds_left=pinned.seconds_left,
            **hits._asdict(),
        )

    def _match(self, message: Match) -> Matched:
        namespace = self._intake.namespace(message.tenant, message.cache_salt)
        for tokens in message.prompts:
            self._intake.check_prompt(tokens)
        is_operator = message.tenant == OPERATOR
        if is_operator:
            load = count_requests(self._scheduler, self._gate)
        else:
            load = count_requests_of([message.tenant], self._scheduler, self._gate)[message.tenant]
        return Matched(
            id=message.id,
            prompts=tuple(self._match_tiers(namespace, tokens) for tokens in message.prompts),
            n_running=load.n_running,
            n_waiting=load.n_waiting,
            n_pages_free=self._cache.n_free if is_operator else None,
            n_pages_evictable=self._cache.n_available - self._cache.n_free if is_operator else None,
        )

    def _match_tiers(self, namespace: Namespace, tokens: bytes) -> TierMatch:
        n_tokens = len(tokens) // TOKEN_BYTES
        if self._transfers is None:
            (n_device,) = self._cache.matches([(namespace, tokens)])
            return TierMatch(n_tokens, n_device, 0, 0)
        cached = self._transfers.match(namespace, tokens)
        cached = self._transfers.match_disk(namespace, tokens, cached)
        return TierMatch(n_tokens, cached.n_device, cached.n_beyond_device, cached.n_beyond_host)

    def _outline(self, message: Outline) -> Outlined:
        device, contents = self._cache.tree, message.contents
        if self._transfers is None:
            return Outlined(message.id, self._outline_tree(device, 1, contents))
        host = self._transfers.host.tree
        return Outlined(
            message.id,
            self._outline_tree(device, 2, contents),
            self._outline_tree(host, 2, contents),
            self._outline_joint(device, host, contents),
        )

    def _outline_tree(self, tree: RadixTree, n_trees: int, contents: bool) -> TierOutline:
        """Outlines one of ``n_trees`` trees, which share the limits."""
        outline = tree.outline(max_nodes=MAX_OUTLINED_NODES // n_trees, max_visited=MAX_VISITED_NODES // n_trees)
        nodes = [self._outlined(each, [(tree, each.node)], contents) for each in outline.nodes]
        return _tier_outline(outline, nodes, tree.n_pages_reachable)

    def _outline_joint(self, device: RadixTree, host: RadixTree, contents: bool) -> TierOutline:
        """Outlines the trees of device and host tier as one."""
        runs = joint_roots(device.roots, host.roots, TOKEN_BYTES * self._cache.page_size)
        outline = make_outline(runs, lambda run: None, max_nodes=MAX_OUTLINED_NODES, max_visited=MAX_VISITED_NODES)
        nodes = []
        for each in outline.nodes:
            run, found = each.node, dict[Tier, tuple[RadixTree, Node]]()
            if run.upper is not None:
                found["device"] = device, run.upper
            if run.lower is not None:
                found["host"] = host, run.lower
            nodes.append(self._outlined(each, list(found.values()), contents, tuple(found)))
        return _tier_outline(outline, nodes, max(tree.n_pages_reachable for tree in (device, host)))

    def _outlined(
        self,
        each: OutlinedNode[Node] | OutlinedNode[JointRun],
        found: list[tuple[RadixTree, Node]],
        contents: bool,
        tiers: tuple[Tier, ...] = (),
    ) -> TreeNode:
        """Returns what is told of a run, which is found as these nodes of these trees."""
        last_uses = [use for tree, node in found if (use := tree.last_use(node)) is not None]
        age, idle_s = min(last_uses, key=itemgetter(1), default=(None, None))
        return TreeNode(
            serial=each.node.serial,
            parent=each.parent,
            n_own_pages=len(each.node.pages),
            n_pages=each.n_pages,
            n_leases=sum(node.n_leases for _, node in found),
            n_hits=max(node.n_hits for _, node in found),
            age=age,
            is_pinned=any(node.n_retentions > 0 for _, node in found),
            n_more=each.n_more,
            n_more_pages=each.n_more_pages,
            namespace=self._label(found[0][1].namespace) if each.parent < 0 else "",
            tokens=bytes(each.node.key[: MAX_SHOWN_TOKENS * TOKEN_BYTES]) if contents else b"",
            idle_s=idle_s,
            tiers=tiers,
        )

    def _label(self, namespace: Namespace) -> str:
        """Returns a label from which a salt cannot be guessed: the key is drawn at each start."""
        if namespace == Namespace():
            return ""
        return blake2b("\0".join(map(str, namespace)).encode(), key=self._label_key, digest_size=4).hexdigest()

    def _pin(self, message: Pin) -> Pinned:
        self._intake.check_prompt(message.tokens)
        namespace = self._intake.namespace(message.tenant, message.cache_salt)
        check_ttl(message.ttl_s, "ttl")
        self._pins.check_available("ttl")
        if message.ttl_s:
            self._pins.pin(namespace, message.tokens, message.ttl_s)
        else:
            self._pins.unpin(namespace, message.tokens)
        pinned = self._pins.find(namespace, message.tokens)
        return Pinned(message.id, len(message.tokens) // TOKEN_BYTES, pinned.n_tokens, pinned.seconds_left)


def _tier_outline(outline: TreeOutline[RunT], nodes: list[TreeNode], n_pages: int) -> TierOutline:
    """Returns the message of an outline of at least ``n_pages`` pages."""
    n_pages = max(n_pages, outline.n_pages)
    n_not_visited = n_pages - outline.n_pages
    return TierOutline(tuple(nodes), n_pages, n_not_visited, outline.n_more_roots, outline.n_more_root_pages)


class _TierHits(NamedTuple):
    """Fields of ``Explained``: what the tiers have of a prompt."""

    n_in_host: int = 0
    is_loaded: bool = False
    min_loaded_tokens: float | None = None
    n_on_disk: int = 0
    is_fetched: bool = False


def _look(transfers: Transfers, namespace: Namespace, tokens: bytes) -> _TierHits:
    """Looks for a prompt in host tier and disk. O(edges), with a disk tier O(tokens)."""
    cached = transfers.match(namespace, tokens)
    with_disk = transfers.match_disk(namespace, tokens, cached)
    n_used = len(tokens) // TOKEN_BYTES - 1  # a request computes at least one prompt token
    n_in_host = max(0, min(cached.n_host, n_used) - cached.n_device)
    n_on_disk = max(0, min(with_disk.n_disk, n_used) - max(cached.n_host, cached.n_device))
    return _TierHits(
        n_in_host,
        is_loaded=n_in_host > 0 and transfers.should_load(cached),
        min_loaded_tokens=transfers.cost.min_tokens if transfers.load_policy == "auto" else None,
        n_on_disk=n_on_disk,
        is_fetched=n_on_disk > 0 and transfers.should_load(with_disk),
    )
