"""The ``encrypted_content`` of reasoning items, in which clients bring reasoning back to the server."""

from __future__ import annotations

import base64
import binascii

_PREFIX = "radixkv:"
"""Marks the contents that this server wrote: those of other servers cannot be read."""


def sealed_reasoning(text: str) -> str:
    """Returns reasoning as ``encrypted_content``. It is encoded and not encrypted: the client may see it anyway."""
    return _PREFIX + base64.b64encode(text.encode()).decode()


def unsealed_reasoning(content: object) -> str:
    """Returns the reasoning of an ``encrypted_content``; empty if this server did not write it."""
    if not isinstance(content, str) or not content.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
