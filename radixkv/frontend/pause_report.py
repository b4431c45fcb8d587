"""What the server has learnt of pauses between turns, in fields and words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixkv.wire.stats import PauseKindStats, PauseStats


def pause_fields(pauses: PauseStats) -> dict[str, Any]:
    """Returns the JSON object of all pauses. O(kinds).

    Its ``kinds`` have the names that clients give their tools, where ``PauseStats`` has them.
    """
    kinds: list[dict[str, Any]] = []
    for key, kind in pauses.kinds.items():
        tenant, *tools = key.split("\0")
        kinds.append(_kind_fields(tenant, tools, kind))
    return {
        "open": pauses.n_pauses,
        "spared_tokens": pauses.n_spared_tokens,
        "returns": pauses.returns_total,
        "returns_on_device": pauses.returns_on_device_total,
        "given_up": pauses.given_up_total,
        "text": _summary(pauses),
        "kinds": kinds,
    }


def _summary(pauses: PauseStats) -> str:
    text = f"{_chats(pauses.n_pauses)} expected to go on"
    if not pauses.returns_total:
        return text
    share = pauses.returns_on_device_total / pauses.returns_total
    return f"{text}; {share:.0%} of {pauses.returns_total:,} that went on were cached on the device as a whole"


def _kind_fields(tenant: str, tools: Sequence[str], kind: PauseKindStats) -> dict[str, Any]:
    n_ended = kind.returns_total + kind.given_up_total
    fields: dict[str, Any] = {
        "tools": ", ".join(tools),
        "open": kind.n_open,
        "returns": kind.returns_total,
        "returns_on_device": kind.returns_on_device_total,
        "given_up": kind.given_up_total,
        "return_share": round(kind.returns_total / n_ended, 4) if n_ended else None,
        "median_seconds": None if kind.median_s is None else round(kind.median_s, 3),
        "p90_seconds": None if kind.p90_s is None else round(kind.p90_s, 3),
    }
    return fields | ({"tenant": tenant} if tenant else {}) | {"text": _kind_text(tenant, tools, kind)}


def _kind_text(tenant: str, tools: Sequence[str], kind: PauseKindStats) -> str:
    name = f"tool{'s' if len(tools) > 1 else ''} {', '.join(tools)}" if tools else "users"
    parts = [f"{name} of {tenant}" if tenant else name]
    if kind.median_s is not None and kind.p90_s is not None:
        n_ended = kind.returns_total + kind.given_up_total
        parts.append(f"{kind.returns_total / n_ended:.0%} of {n_ended:,} came back")
        on_device = f"{kind.returns_on_device_total / kind.returns_total:.0%}"
        parts.append(
            f"of these {on_device} were on the device, and lately half came "
            f"within {_seconds(kind.median_s)}, nine of ten within {_seconds(kind.p90_s)}"
        )
    elif kind.given_up_total:
        parts.append(f"none of {kind.given_up_total:,} came back")
    if kind.n_open:
        parts.append(f"{kind.n_open:,} expected")
    return f"{parts[0]}: {', '.join(parts[1:])}" if parts[1:] else parts[0]


def _chats(n_chats: int) -> str:
    return f"{n_chats:,} chat{' is' if n_chats == 1 else 's are'}"


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 10 else f"{value:,.0f} s"
