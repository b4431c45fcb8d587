"""Keys of pages: whatever a page's KV depends on changes them."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from radixkv.runtime.tiers.stores.page_keys import KeyChain, KVIdentity, StateKeys, chain, namespace_key, root_key
from radixkv.tree.marks import Marks
from radixkv.tree.node import Namespace

STATES = StateKeys(3, 2, 64)
IDENTITY = KVIdentity("model", "cpu", "avx2", "2.11.0", "float32", "float32", "", "LKV16", 16)
TOKENS = bytes(range(64)) * 4


def keys_with(
    identity: KVIdentity = IDENTITY, namespace: Namespace = Namespace(), tokens: bytes = TOKENS
) -> list[bytes]:
    return chain(namespace_key(root_key(identity), namespace), tokens, 64)


def test_every_field_of_the_identity_and_of_the_namespace_changes_every_key() -> None:
    """Also those of states, which are none of pages, and others after each page."""
    others = [IDENTITY._replace(**{field: 17 if field == "page_size" else "other"}) for field in IDENTITY._fields]
    ranks = [IDENTITY._replace(layout=f"{IDENTITY.layout}, of each of {n} ranks") for n in (2, 4)]
    runs = [keys_with(), *(keys_with(identity) for identity in (*others, *ranks))]
    runs += [keys_with(namespace=Namespace(**{field: "other"})) for field in ("tenant", "salt", "adapter")]
    runs.append(keys_with(namespace=Namespace(epoch=1)))
    keys = [key for run in runs for key in run]
    assert len(runs) == 3 + len(IDENTITY._fields) + len(Namespace._fields)
    assert len(set(keys)) == len(keys) == 4 * len(runs)
    of_states = [key for run in runs for end in run for key in STATES.all(end)]
    assert len({*keys, *of_states}) == len(keys) + len(of_states) == 16 * len(runs)


def test_states_are_after_multiples_of_an_interval_the_deepest_first() -> None:
    assert list(STATES.ends(7)) == [6, 4, 2]
    assert list(STATES.ends(6, 2)) == [6, 4]
    assert list(STATES.ends(3, 2)) == list(STATES.ends(1)) == []
    key = keys_with()[1]
    assert STATES.all(key) == chain(key, b"\xff" * 192, 64), "tokens -1, which no prompt has"
    assert STATES.first(key) == STATES.all(key)[0]


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


def test_a_mark_stands_for_the_whole_digest_of_its_adapter() -> None:
    """Servers that share a store may have other adapters with equal marks."""
    root, key = root_key(IDENTITY), TOKENS[:100] + (-5).to_bytes(4, "little", signed=True) + TOKENS[104:]
    digests = [f"{3:08x}{digit * 56}" for digit in "12"]
    found = []
    for digest in digests:
        (marks := Marks()).add(digest, [1])
        assert marks.find(key) == [(25, (digest, (1).to_bytes(4, "little")))]
        found.append(KeyChain(root, 64, marks).keys(Namespace(), key))
        assert KeyChain(root, 64, marks).keys(Namespace(), TOKENS) == keys_with(), (
            "those without marks are the same"
        )
    for one, other in ((found[0], found[1]), (found[0], keys_with()), (found[1], keys_with())):
        assert [first == second for first, second in zip(one, other, strict=True)] == [True, False, False, False]


def test_the_deepest_window_is_one_whose_pages_are_all_there() -> None:
    """A window has three pages; the search goes on behind a missing one at the deepest end that needs it not."""
    windows = StateKeys(3, 1, 64, n_parts=3)
    keys = [bytes([n]) for n in range(12)]
    cases = [({9, 8, 7}, 10), ({11, 10, 8, 7, 6, 5}, 9), ({11, 10, 1, 0}, 2), ({11, 2, 0}, 1), ({11, 2}, 0)]
    for stored, expected in cases:
        assert windows.deepest(keys, 12, 0, lambda key, stored=stored: key[0] in stored) == expected
    assert windows.deepest(keys, 12, 10, lambda key: key[0] in {9, 8, 7}) == 10
