"""The replies of several replicas as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import nlargest
from typing import Any, TypeAlias, TypeVar

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
from radixkv.wire.stats import MAX_SHOWN_KINDS, PauseKindStats, PauseStats
from radixkv.wire.table_messages import Tabled

ReplyT = TypeVar("ReplyT", Flushed, Invalidated, SessionClosed)

_Rule: TypeAlias = Callable[[Sequence[Any], str], Any]
"""Returns one value of a field, from all structs that have it, and its name."""

MEANS = frozenset({"load_seconds_per_token", "compute_seconds_per_token", "fetch_seconds_per_token"})
"""Fields with moving averages."""
QUANTILES = frozenset({"median_s", "p90_s"})
"""Fields of kinds of pauses with quantiles of what was seen lately."""
_MAXIMA = frozenset({"page_bytes", "start_seconds", "is_away", "n_adapters", "n_unloaded"})
"""Fields that are equal, or of which the greatest matters."""


def added(values: Sequence[Any], name: str = "") -> Any:
    """Returns values of one type as one: numbers and the fields of structs are added, other values are equal.

    ``_MAXIMA``, ``MEANS`` and ``_RULES`` name the fields of which something else becomes one value.

    Args:
        values: of one type, or None, which adds nothing.
        name: of the field that has them.
    """
    values = [value for value in values if value is not None]
    if not values:
        return None
    first = values[0]
    if isinstance(first, msgspec.Struct):
        rules = _RULES.get(type(first), {})
        joint: dict[str, Any] = {}
        for field in first.__struct_fields__:
            rule: _Rule = rules.get(field, _added_field)
            joint[field] = rule(values, field)
        return type(first)(**joint)
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: added([value[key] for value in values if key in value], name) for key in keys}
    if isinstance(first, tuple):
        return tuple(added(items, name) for items in zip(*values, strict=True))
    if name in _MAXIMA:
        return max(values)
    if name in MEANS:
        return sum(values) / len(values)
    return sum(values) if isinstance(first, int | float) else first


def _added_field(structs: Sequence[Any], field: str) -> Any:
    return added([getattr(one, field) for one in structs], field)


def _mean_of_returns(kinds: Sequence[PauseKindStats], field: str) -> float | None:
    """Returns the mean of a quantile, weighted by how many pauses have returned; None if none has one."""
    known = [(getattr(kind, field), kind.returns_total) for kind in kinds if getattr(kind, field) is not None]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None


def _most_seen(stats: Sequence[PauseStats], field: str) -> dict[str, PauseKindStats]:
    """Returns the kinds with the most pauses, as many as those of one replica, in their order."""
    kinds: dict[str, PauseKindStats] = _added_field(stats, field)

    def n_seen(key: str) -> int:
        return kinds[key].n_open + kinds[key].returns_total + kinds[key].given_up_total

    return {key: kinds[key] for key in nlargest(MAX_SHOWN_KINDS, kinds, key=n_seen)}


_RULES: Mapping[type[msgspec.Struct], Mapping[str, _Rule]] = {
    PauseKindStats: dict.fromkeys(QUANTILES, _mean_of_returns),
    PauseStats: {"kinds": _most_seen},
}
"""Fields that are not added, by the type of their struct."""


def sum_counts(replies: Sequence[ReplyT]) -> ReplyT:
    """Returns one reply with the sums of all counts; None stays None. O(replies)."""
    joint: ReplyT = added(replies)
    return joint


def best_match(replies: Sequence[Matched]) -> Matched:
    """Returns for each prompt what that replica has which has the most of it, and the load of all. O(prompts)."""
    joint: Matched = added([msgspec.structs.replace(reply, prompts=()) for reply in replies])
    of_prompts = zip(*(reply.prompts for reply in replies), strict=True)
    prompts = tuple(
        max(matches, key=lambda match: match.n_on_device + match.n_in_host + match.n_on_disk)
        for matches in of_prompts
    )
    return msgspec.structs.replace(joint, prompts=prompts)


def joint_outline(replies: Mapping[int, Outlined], n_replicas: int) -> Outlined:
    """Returns the trees of all replicas beside each other; each root says whose it is. O(nodes).

    Args:
        replies: by the number of the replica, at least one.
        n_replicas: all of them, those included that have not replied.
    """
    device = _beside({index: reply.device for index, reply in replies.items()}, n_replicas)
    assert device is not None, "there is a reply"
    return Outlined(
        next(iter(replies.values())).id,
        device,
        _beside({index: reply.host for index, reply in replies.items()}, n_replicas),
        _beside({index: reply.joint for index, reply in replies.items()}, n_replicas),
    )


def joint_tables(replies: Mapping[int, Tabled]) -> Tabled:
    """Returns the block tables of several replicas, each of which says whose it is, and the sum of their pools.

    O(requests).

    Args:
        replies: by the number of the replica, at least one.
    """
    requests = tuple(
        msgspec.structs.replace(request, replica=index)
        for index, reply in replies.items()
        for request in reply.requests
    )
    first = next(iter(replies.values()))
    pool, n_more = added([reply.pool for reply in replies.values()]), sum(one.n_more for one in replies.values())
    return Tabled(first.id, pool, requests, n_more)


def _beside(all_outlines: Mapping[int, TierOutline | None], n_replicas: int) -> TierOutline | None:
    """Returns the outlines as one. A node's serial is unique, and stays while other replicas come and go."""
    outlines = {index: outline for index, outline in all_outlines.items() if outline is not None}
    if not outlines:
        return None
    nodes: list[TreeNode] = []
    for index, outline in outlines.items():
        first = len(nodes)
        nodes += [
            msgspec.structs.replace(
                node,
                serial=node.serial * n_replicas + index,
                parent=node.parent if node.parent < 0 else first + node.parent,
                replica=index if node.parent < 0 else None,
            )
            for node in outline.nodes
        ]
    counts: TierOutline = added([msgspec.structs.replace(outline, nodes=()) for outline in outlines.values()])
    return msgspec.structs.replace(counts, nodes=tuple(nodes))
