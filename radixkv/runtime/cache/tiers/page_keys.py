"""Keys of pages outside the process: a SHA-256 chain over everything that a page's KV depends on."""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

from radixkv.tree.node import Namespace
from radixkv.version import __version__

DIGEST_BYTES = 32
KEY_BYTES = 2 * DIGEST_BYTES
"""Bytes of a key: its own digest, and the digest of the key that it continues."""

_KEY_VERSION = 1


class KVIdentity(NamedTuple):
    """What all pages of one engine depend on; a page of another identity never matches.

    The values are compared as they are, so their makers choose the form.
    """

    model: str
    """Digest of config and weights (``radixkv.checkpoints.fingerprint``)."""
    device: str
    """Kind of device: ``cpu`` or ``cuda``."""
    processor: str
    """Processor capability: the CPU's instruction sets, or the GPU's compute capability."""
    torch_version: str
    dtype: str
    """Dtype of K and V."""
    kv_scales: str
    """Scales of quantized K and V; empty if there are none."""
    layout: str
    """Order of the dimensions in a page, with their sizes."""
    page_size: int
    """Tokens per page."""


def root_key(identity: KVIdentity) -> bytes:
    """Returns the key that the keys of all namespaces continue.

    Digests the release, too: another release may compute other bits.
    """
    return _key(bytes(DIGEST_BYTES), repr((_KEY_VERSION, __version__, *identity)).encode())


def namespace_key(root: bytes, namespace: Namespace) -> bytes:
    """Returns the key that the first pages of a namespace continue.

    Digests the ``repr`` of the fields, so that no two namespaces give the same bytes.
    """
    return _key(root[:DIGEST_BYTES], repr(tuple(namespace)).encode())


def chain(parent: bytes, tokens: bytes, page_token_bytes: int) -> list[bytes]:
    """Returns the keys of the whole pages of ``tokens``. O(tokens), some 2 µs a page.

    Args:
        parent: key of the page before them, or of the namespace.
        tokens: little-endian int32.
        page_token_bytes: bytes of one page's tokens.
    """
    keys: list[bytes] = []
    for end in range(page_token_bytes, len(tokens) + 1, page_token_bytes):
        parent = _key(parent[:DIGEST_BYTES], tokens[end - page_token_bytes : end])
        keys.append(parent)
    return keys


def _key(parent_digest: bytes, content: bytes) -> bytes:
    return sha256(parent_digest + content).digest() + parent_digest
