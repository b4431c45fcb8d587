"""Keys of pages: whatever a page's KV depends on changes them."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from radixkv.runtime.tiers.stores.page_keys import KeyChain, KVIdentity, chain, namespace_key, root_key
from radixkv.tree.node import Namespace

IDENTITY = KVIdentity("model", "cpu", "avx2", "2.11.0", "float32", "float32", "", "LKV16", 16)
TOKENS = bytes(range(64)) * 4


def keys_with(
    identity: KVIdentity = IDENTITY, namespace: Namespace = Namespace(), tokens: bytes = TOKENS
) -> list[bytes]:
    return chain(namespace_key(root_key(identity), namespace), tokens, 64)


def test_every_field_of_the_identity_and_of_the_namespace_changes_every_key() -> None:
    others = [IDENTITY._replace(**{field: 17 if field == "page_size" else "other"}) for field in IDENTITY._fields]
    runs = [keys_with(), *(keys_with(identity) for identity in others)]
    runs += [keys_with(namespace=Namespace(**{field: "other"})) for field in ("tenant", "salt", "adapter")]
    runs.append(keys_with(namespace=Namespace(epoch=1)))
    keys = [key for run in runs for key in run]
    assert len(runs) == 1 + len(IDENTITY._fields) + len(Namespace._fields)
    assert len(set(keys)) == len(keys) == 4 * len(runs)


def test_a_salt_that_is_no_text_has_a_key() -> None:
    assert keys_with(namespace=Namespace(salt="\ud800")) != keys_with(namespace=Namespace(salt="\\ud800"))


def test_a_token_changes_the_keys_of_its_page_and_of_all_later_pages() -> None:
    changed = bytearray(TOKENS)
    changed[64] ^= 1
    same = [one == other for one, other in zip(keys_with(), keys_with(tokens=bytes(changed)), strict=True)]
    assert same == [True, False, False, False]


def test_a_chain_can_be_continued() -> None:
    keys = keys_with()
    assert keys == [*(first := keys_with(tokens=TOKENS[:128])), *chain(first[-1], TOKENS[128:], 64)]
    assert keys_with(tokens=TOKENS[:-1]) == keys[:-1], "only whole pages have keys"
    assert all(later[32:] == earlier[:32] for earlier, later in pairwise(keys))


def test_remembered_keys_are_those_of_the_same_tokens_after_the_same_tokens() -> None:
    random, root = Random(0), root_key(IDENTITY)
    remembering = KeyChain(root, 8)
    parts = [random.randbytes(8 * n_pages) for n_pages in (1, 31, 32, 32, 33, 64)]
    for _ in range(500):
        tokens = b"".join(random.choices(parts, k=random.randrange(6))) + bytes(random.randrange(9))
        namespace = Namespace(salt=random.choice([None, "a", "b"]))
        assert remembering.keys(namespace, tokens) == chain(namespace_key(root, namespace), tokens, 8)
