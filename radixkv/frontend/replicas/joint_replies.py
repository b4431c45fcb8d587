"""The replies of several replicas as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from radixkv.wire.cache_messages import (
    Flushed,
    Invalidated,
    Matched,
    Outlined,
    SessionClosed,
    TierOutline,
    TreeNode,
)
from radixkv.wire.stats import ReplicaStats, Stats

ReplyT = TypeVar("ReplyT", Flushed, Invalidated, SessionClosed)

_MEANS = frozenset({"load_seconds_per_token", "compute_seconds_per_token", "fetch_seconds_per_token"})
"""Fields with moving averages."""
_MAXIMA = frozenset({"page_bytes", "start_seconds", "is_away"})
"""Fields that are equal, or of which the greatest matters."""


def sum_counts(replies: Sequence[ReplyT]) -> ReplyT:
    """Returns one reply with the sums of all counts; None stays None. O(replies)."""
    joint: ReplyT = _joint(replies)
    return joint


def sum_stats(stats: Mapping[int, Stats], n_restarts: Sequence[int]) -> Stats:
    """Returns the sums of counters and gauges, and those of each replica. O(fields * replicas).

    Args:
        stats: of the replicas that are up, by number; at least one.
        n_restarts: how often each replica was started again, those that are down included.
    """
    replicas = {}
    for index, count in enumerate(n_restarts):
        replicas[str(index)] = ReplicaStats(is_up=False, n_restarts=count)
        if (one := stats.get(index)) is not None:
            fields = ReplicaStats.__struct_fields__[2:]
            replicas[str(index)] = ReplicaStats(True, count, *(getattr(one, name) for name in fields))
    joint: Stats = _joint(list(stats.values()))
    return msgspec.structs.replace(joint, replicas=replicas)


def best_match(replies: Sequence[Matched]) -> Matched:
    """Returns for each prompt what that replica has which has the most of it, and the load of all. O(prompts)."""
    joint: Matched = _joint([msgspec.structs.replace(reply, prompts=()) for reply in replies])
    of_prompts = zip(*(reply.prompts for reply in replies), strict=True)
    prompts = tuple(
        max(matches, key=lambda match: match.n_on_device + match.n_in_host + match.n_on_disk)
        for matches in of_prompts
    )
    return msgspec.structs.replace(joint, prompts=prompts)


def joint_outline(replies: Sequence[Outlined]) -> Outlined:
    """Returns the trees of all replicas beside each other. O(nodes)."""
    return Outlined(
        replies[0].id,
        _beside([reply.device for reply in replies]),
        _beside_or_none([reply.host for reply in replies]),
        _beside_or_none([reply.joint for reply in replies]),
    )


def _beside_or_none(outlines: Sequence[TierOutline | None]) -> TierOutline | None:
    present = [outline for outline in outlines if outline is not None]
    return _beside(present) if present else None


def _beside(outlines: Sequence[TierOutline]) -> TierOutline:
    nodes: list[TreeNode] = []
    for index, outline in enumerate(outlines):
        first = len(nodes)
        nodes += [
            msgspec.structs.replace(
                node,
                serial=node.serial * len(outlines) + index,
                parent=node.parent if node.parent < 0 else first + node.parent,
            )
            for node in outline.nodes
        ]
    counts: TierOutline = _joint([msgspec.structs.replace(outline, nodes=()) for outline in outlines])
    return msgspec.structs.replace(counts, nodes=tuple(nodes))


def _joint(values: Sequence[Any], name: str = "") -> Any:
    """Returns values of one type as one: numbers and the fields of structs are added, other values are equal."""
    values = [value for value in values if value is not None]
    if not values:
        return None
    first = values[0]
    if isinstance(first, msgspec.Struct):
        fields = first.__struct_fields__
        return type(first)(**{field: _joint([getattr(one, field) for one in values], field) for field in fields})
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _joint([value[key] for value in values if key in value], name) for key in keys}
    if isinstance(first, tuple):
        return tuple(_joint(items, name) for items in zip(*values, strict=True))
    if name in _MAXIMA:
        return max(values)
    if name in _MEANS:
        return sum(values) / len(values)
    return sum(values) if isinstance(first, int | float) else first
