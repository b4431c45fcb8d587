"""How many fingerprints are kept, of whom, and for how long."""

from __future__ import annotations

from radixkv.frontend.cache_diagnostics.fingerprint import Fingerprint
from radixkv.frontend.cache_diagnostics.kept_fingerprints import KeptFingerprints


def fingerprint(n_pages: int = 1) -> Fingerprint:
    tokens = bytes(64 * n_pages)
    return Fingerprint.of(cache_salt="", adapter="", parts={"model": "m"}, messages=[], key=tokens, page_size=16)


def test_an_id_is_found_by_its_tenant_alone() -> None:
    kept, one = KeptFingerprints(), fingerprint()
    kept.keep("a", "msg_1", one)
    assert kept.find("a", "msg_1") is one
    assert [kept.find(tenant, name) for tenant, name in (("b", "msg_1"), ("", "msg_1"), ("a", "msg_2"))] == [
        None
    ] * 3


def test_the_least_recently_used_one_gives_way() -> None:
    kept, one = KeptFingerprints(max_bytes=3 * fingerprint().n_bytes), fingerprint()
    for name in "abc":
        kept.keep("", name, one)
    kept.keep("another", "a", one)
    assert kept.find("", "a") is one, "no other tenant drops it"
    kept.keep("", "d", one)
    assert [name for name in "abcd" if kept.find("", name) is one] == ["a", "c", "d"]
    kept.keep("", "e", fingerprint(1000))
    assert [name for name in "acde" if kept.find("", name) is not None] == [], "it is larger than the limit"
    kept.keep("", "f", one)
    assert kept.find("", "f") is one


def test_an_old_one_is_not_found() -> None:
    now = 1000.0
    kept, one = (
        KeptFingerprints(max_bytes=2 * fingerprint().n_bytes, max_age_s=60.0, clock=lambda: now),
        fingerprint(),
    )
    kept.keep("", "a", one)
    now += 60.0
    assert kept.find("", "a") is one
    now += 1.0
    assert kept.find("", "a") is None
    assert kept.find("", "a") is None
    for name in "bcd":
        kept.keep("", name, one)
    assert [name for name in "bcd" if kept.find("", name) is one] == ["c", "d"], "its room is free again"
