"""Answers the messages that look at the cache or change it on a client's behalf."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from operator import itemgetter
from typing import Any

from radixkv.errors import RequestError
from radixkv.runtime.intake import Intake
from radixkv.runtime.protocols.adapters import Adapters
from radixkv.runtime.protocols.gate import Gate
from radixkv.runtime.reporting.joint import JointRun, joint_roots
from radixkv.runtime.reporting.stats import count_requests, count_requests_of
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.settings.tenants import OPERATOR
from radixkv.tree.node import TOKEN_BYTES, Namespace, Node
from radixkv.tree.outline import Outline as TreeOutline
from radixkv.tree.outline import OutlinedNode, RunT
from radixkv.tree.outline import outline as make_outline
from radixkv.tree.radix_tree import RadixTree
from radixkv.wire.cache_messages import (
    CacheCommand,
    CacheReply,
    Explain,
    Explained,
    Flush,
    Flushed,
    GetStored,
    Invalidate,
    Invalidated,
    Match,
    Matched,
    Outline,
    Outlined,
    Stored,
    Tier,
    TierMatch,
    TierOutline,
    TreeNode,
)
from radixkv.wire.messages import Failed, unpack_tokens
from radixkv.wire.request_limits import check_prefix

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
        intake: checks prompts and salts.
        scheduler: has the caches, and the requests to count.
        gate: holds further requests.
        adapters: for which further requests may wait.
        find_pin: returns how many tokens of a prompt are pinned, for how many seconds, and whether by its own pin.
        others: carry out the commands of other branches, by the type of their message.
        before_flush: these are called before the caches are emptied.
    """

    def __init__(
        self,
        intake: Intake,
        scheduler: Scheduler,
        gate: Gate,
        adapters: Adapters,
        *,
        find_pin: Callable[[Namespace, bytes], tuple[int, float, bool]],
        others: Mapping[type[CacheCommand], Callable[[Any], CacheReply]],
        before_flush: Sequence[Callable[[], None]],
    ) -> None:
        self._cache = scheduler.cache
        self._tiers = scheduler.tiers
        self._intake = intake
        self._scheduler = scheduler
        self._gate = gate
        self._adapters = adapters
        self._find_pin = find_pin
        self._before_flush = before_flush
        self._label_key = os.urandom(16)
        self._handlers: dict[type[CacheCommand], Callable[[Any], CacheReply]] = {
            Flush: self._flush,
            Invalidate: self._invalidate,
            Explain: self._explain,
            Match: self._match,
            GetStored: self._stored,
            Outline: self._outline,
            **others,
        }

    def run(self, message: CacheCommand) -> CacheReply | Failed:
        """Carries out a message; returns its answer.

        O(tokens) for ``Explain``, ``Match``, ``GetStored`` and ``Pin``, O(``MAX_VISITED_NODES``) for ``Outline``,
        else O(pages).
        """
        try:
            return self._handlers[type(message)](message)
        except RequestError as error:
            return Failed(message.id, error.code, str(error), error.param)

    def _flush(self, message: Flush) -> Flushed:
        for forget in self._before_flush:
            forget()
        self._tiers.flush()
        n_freed, n_leased = self._cache.flush()
        return Flushed(message.id, n_freed, n_leased)

    def _invalidate(self, message: Invalidate) -> Invalidated:
        self._intake.check_owns_cache(message.namespace.tenant)
        page_size = self._cache.page_size
        n_tokens = len(message.tokens) // TOKEN_BYTES
        if message.tokens:
            self._intake.check_prompt(message.tokens)
            check_prefix(n_tokens, page_size)
        whole_pages = message.tokens[: (n_tokens - n_tokens % page_size) * TOKEN_BYTES]
        prefixes = self._intake.prefixes(message, whole_pages)
        n_on_device = n_held = 0
        n_in_host: int | None = None
        n_on_disk: int | None = None
        for namespace, key in prefixes:
            on_device, held = self._cache.invalidate(namespace, key)
            in_host, on_disk = self._tiers.invalidate(namespace, key, message.lowest_tier)
            n_on_device, n_held = n_on_device + on_device, n_held + held
            n_in_host = None if in_host is None else (n_in_host or 0) + in_host
            n_on_disk = None if on_disk is None else (n_on_disk or 0) + on_disk
        return Invalidated(message.id, n_on_device, n_held, n_in_host, n_on_disk)

    def _explain(self, message: Explain) -> Explained:
        self._intake.check_prompt(message.tokens)
        namespace, key, _ = self._intake.prompt_key(message.namespace, message.tokens)
        n_tokens = len(message.tokens) // TOKEN_BYTES
        hits = self._tiers.find(namespace, key)
        if message.namespace.tenant != OPERATOR:
            hits = hits._replace(min_loaded_tokens=None, n_from_shared=None)
        cache = self._tiers.host if self._tiers.host is not None and hits.is_loaded else self._cache
        explanation = cache.tree.explain(namespace, key, contents=message.contents)
        n_pinned, pin_seconds_left, has_own_pin = self._find_pin(namespace, key)
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
            n_without_state=explanation.n_without_state,
            first_difference=position,
            token=token,
            cached_token=explanation.cached_token,
            n_cached_elsewhere=explanation.n_tokens_elsewhere,
            adapter_elsewhere=explanation.adapter_elsewhere,
            is_demoted=cache.tree.demotions.reach_end(namespace, key),
            n_pinned=n_pinned,
            pin_seconds_left=pin_seconds_left,
            has_own_pin=has_own_pin,
            n_in_host=hits.n_in_host,
            is_loaded=hits.is_loaded,
            min_loaded_tokens=hits.min_loaded_tokens,
            n_on_disk=hits.n_on_disk,
            is_fetched=hits.is_fetched,
            n_fetched=hits.n_fetched,
            n_from_shared=hits.n_from_shared,
        )

    def _match(self, message: Match) -> Matched:
        for tokens in message.prompts:
            self._intake.check_prompt(tokens)
        keys = [self._intake.prompt_key(message.namespace, tokens) for tokens in message.prompts]
        sender = message.namespace.tenant
        if is_operator := sender == OPERATOR:
            load = count_requests(self._scheduler, self._gate, self._adapters)
        else:
            load = count_requests_of(sender, self._scheduler, self._gate, self._adapters)
        return Matched(
            id=message.id,
            prompts=tuple(match_tiers(self._scheduler, namespace, key) for namespace, key, _ in keys),
            n_running=load.n_running,
            n_waiting=load.n_waiting,
            n_pages_free=self._cache.n_free if is_operator else None,
            n_pages_evictable=self._cache.n_available - self._cache.n_free if is_operator else None,
        )

    def _stored(self, message: GetStored) -> Stored:
        self._intake.check_prompt(message.tokens)
        namespace, key, _ = self._intake.prompt_key(message.namespace, message.tokens)
        return Stored(message.id, *self._tiers.stored(namespace, key))

    def _outline(self, message: Outline) -> Outlined:
        device, contents = self._cache.tree, message.contents
        if self._tiers.host is None:
            return Outlined(message.id, self._outline_tree(device, 1, contents))
        host = self._tiers.host.tree
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
            tokens=self._cache.tree.marks.tokens(each.node.key[: MAX_SHOWN_TOKENS * TOKEN_BYTES])
            if contents
            else b"",
            idle_s=idle_s,
            tiers=tiers,
            has_state=any(node.state is not None and node.state.is_computed for _, node in found),
        )

    def _label(self, namespace: Namespace) -> str:
        """Returns a label from which a salt cannot be guessed: the key is drawn at each start."""
        if namespace == Namespace():
            return ""
        return blake2b("\0".join(map(str, namespace)).encode(), key=self._label_key, digest_size=4).hexdigest()


def match_tiers(scheduler: Scheduler, namespace: Namespace, tokens: bytes) -> TierMatch:
    """Returns how much of a prompt every tier has. Changes nothing. O(edges), and with a disk tier O(tokens)."""
    (n_device,) = scheduler.cache.matches([(namespace, tokens)])
    hits = scheduler.tiers.find(namespace, tokens)
    return TierMatch(len(tokens) // TOKEN_BYTES, n_device, hits.n_beyond_device, hits.n_beyond_host)


def _tier_outline(outline: TreeOutline[RunT], nodes: list[TreeNode], n_pages: int) -> TierOutline:
    """Returns the message of an outline of at least ``n_pages`` pages."""
    n_pages = max(n_pages, outline.n_pages)
    n_not_visited = n_pages - outline.n_pages
    return TierOutline(tuple(nodes), n_pages, n_not_visited, outline.n_more_roots, outline.n_more_root_pages)
