"""Errors for specifications that xgrammar refuses or only partly enforces."""

from __future__ import annotations

import re

from radixkv.errors import InvalidRequest

_PLACE_IN_XGRAMMAR = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+?:\d+: (Check failed: \(.*?\) is false: |Warning: )?")


def refusal(text: str) -> InvalidRequest:
    """Returns the error for a specification that xgrammar refuses or only partly enforces.

    Args:
        text: what xgrammar says, with the place in its source.
    """
    lines = (_PLACE_IN_XGRAMMAR.sub("", line) for line in text.splitlines())
    reason = " ".join("; ".join(dict.fromkeys(line for line in lines if line)).split())
    reason = reason or "a part of it repeats too often; xgrammar enforces up to 128 repeats in a pattern"
    shown = reason if len(reason) <= 300 else f"{reason[:200]}...{reason[-80:]}"
    return InvalidRequest(f"what the answer must match cannot be enforced: {shown}", param="structured_outputs")
