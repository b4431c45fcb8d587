"""The part of the cache that a message means."""

from __future__ import annotations

import msgspec


class CacheNamespace(msgspec.Struct, frozen=True, array_like=True):
    """Who asks, and with which salt and adapter. The runtime derives from it which requests share pages.

    It makes a ``tree.node.Namespace`` of it, which may have fewer fields: a tenant may share with all, and prompts
    of an activated LoRA begin with pages of the model alone.
    """

    tenant: str = ""
    """Who has sent the message; empty for the operator, and without tenants."""
    cache_salt: str = ""
    adapter: str = ""
    """Digest of the adapter that changes the model; empty: the model alone."""
