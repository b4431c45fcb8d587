"""What is known of pages that have left the cache, and why a match ends, against a memory that never forgets."""

from __future__ import annotations

from random import Random

import pytest

from radixkv.tree.history import PageHistory
from radixkv.tree.node import Namespace
from radixkv.tree.radix_tree import RadixTree
from support.trees import ids, insert

NAMESPACES = (Namespace(), Namespace(salt="hers"))


@pytest.mark.parametrize("n_digests", [10, 100, 1000])
def test_nothing_wrong_is_said_of_a_digest_whether_it_is_forgotten_or_not(n_digests: int) -> None:
    random, history, latest = Random(n_digests), PageHistory(64), dict[int, str]()
    digests = [random.getrandbits(64) for _ in range(n_digests)]
    for step in range(2000):
        digest, is_evicted = random.choice(digests), random.random() < 0.6
        history.add([digest], is_evicted=is_evicted)
        latest[digest] = "evicted" if is_evicted else "dropped"
        assert history.departure(digest) == latest[digest], "the newest is never forgotten"
        for other in random.sample(digests, 5):
            assert history.departure(other) in {latest.get(other), "forgotten"}
            assert history.departure(other) == latest.get(other) or step >= 8, "a bucket has room for eight"
    if n_digests == 1000:
        n_known = sum(history.departure(digest) in ("evicted", "dropped") for digest in digests)
        assert n_known == 64, "the table is full"


class Past:
    """A tree, and everything that was ever cached in it and why it left, by namespace and prefix."""

    def __init__(self, page_size: int, seed: int, n_remembered: int) -> None:
        self.tree = RadixTree(page_size)
        self.tree.history = PageHistory(n_remembered)
        self.forgets = n_remembered < 100
        self.page_bytes = 4 * page_size
        self.random = Random(seed)
        self.cached: dict[tuple[Namespace, bytes], int] = {}
        self.left: dict[tuple[Namespace, bytes], str] = {}
        self.n_pages = 0
        self.seen: list[tuple[Namespace, bytes]] = []

    def prefixes(self, tokens: bytes) -> list[bytes]:
        return [tokens[:end] for end in range(self.page_bytes, len(tokens) + 1, self.page_bytes)]

    def prompt(self) -> tuple[Namespace, bytes]:
        """Returns a prompt: a part of one that was seen, or none, and some tokens of two kinds."""
        namespace, stem = self.random.choice(NAMESPACES), b""
        if self.seen and self.random.random() < 0.9:
            namespace, stem = self.random.choice(self.seen)
            stem = stem[: 4 * self.random.randrange(len(stem) // 4 + 1)]
        return namespace, stem + ids(*(self.random.choice((1, 2)) for _ in range(self.random.randrange(6))))

    def serve(self, namespace: Namespace, tokens: bytes) -> None:
        """Runs a request whose pages are all computed."""
        self.seen.append((namespace, tokens))
        lease = self.tree.lease(namespace, tokens)
        rest = tokens[4 * lease.n_tokens : len(tokens) - len(tokens) % self.page_bytes]
        pages = list(range(self.n_pages, self.n_pages + len(rest) // self.page_bytes))
        self.n_pages += len(pages)
        self.tree.commit(lease, rest, pages)
        self.tree.mark_computed(lease, lease.n_tokens)
        for prefix in self.prefixes(tokens):
            if (namespace, prefix) not in self.cached:
                self.cached[namespace, prefix] = pages.pop(0)
        self.tree.release(lease)

    def evict(self, n_pages: int) -> None:
        freed = {page for run in self.tree.evict(n_pages) for page in run.pages}
        self._leave([key for key, page in self.cached.items() if page in freed], "evicted")

    def invalidate(self, namespace: Namespace, tokens: bytes) -> None:
        freed = set(self.tree.detach(namespace, tokens))
        self._leave([key for key, page in self.cached.items() if page in freed], "dropped")

    def _leave(self, keys: list[tuple[Namespace, bytes]], why: str) -> None:
        for key in keys:
            del self.cached[key]
            self.left[key] = why

    def check(self, namespace: Namespace, tokens: bytes) -> str:
        """Checks the reason why the match of a prompt ends; returns it."""
        prefixes = self.prefixes(tokens)
        matched, missing = b"", None
        for prefix in prefixes:
            if (namespace, prefix) not in self.cached:
                missing = prefix
                break
            matched = prefix
        explanation = self.tree.explain(namespace, tokens)
        assert explanation.n_tokens == len(matched) // 4
        goes_on = any(
            one == namespace and prefix.startswith(matched) and prefix != matched for one, prefix in self.cached
        )
        match None if missing is None else self.left.get((namespace, missing)):
            case _ if missing is None:
                allowed = {"whole"}
            case "evicted":
                allowed = {"evicted"}
            case "dropped":
                allowed = {"never_seen", "other_namespace"}
            case _:
                allowed = {"differs" if goes_on else "never_seen", "other_namespace"}
        if self.forgets and missing is not None:
            allowed |= {"evicted_or_never_seen", "other_namespace"}
        assert explanation.reason in allowed
        return explanation.reason


@pytest.mark.parametrize("page_size", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n_remembered", [32, 1 << 12])
def test_a_reason_is_true_of_all_that_was_ever_cached(page_size: int, seed: int, n_remembered: int) -> None:
    past = Past(page_size, seed, n_remembered)
    reasons = []
    for _ in range(400):
        namespace, tokens = past.prompt()
        match past.random.randrange(10):
            case 0 | 1 | 2:
                past.evict(past.random.randrange(1, 8))
            case 3 if past.random.random() < 0.3:
                past.invalidate(namespace, b"" if past.random.random() < 0.2 else tokens)
            case 4 | 5 | 6 | 7:
                past.serve(namespace, tokens)
        reasons.append(past.check(*past.prompt()))
    expected = {"whole", "differs", "evicted", "never_seen"}
    if past.forgets:
        assert "evicted_or_never_seen" in reasons
    else:
        assert expected <= set(reasons)
        assert "evicted_or_never_seen" not in reasons


def test_a_page_in_the_middle_of_an_evicted_run_is_known() -> None:
    """A run is evicted, its first page comes back with another one behind it, and then the old prompt."""
    tree = RadixTree(2)
    tree.release(insert(tree, ids(1, 2, 3, 4, 5, 6), range(3)))
    tree.evict(3)
    tree.release(insert(tree, ids(1, 2, 9, 9), range(2)))
    assert tree.explain(Namespace(), ids(1, 2, 3, 4, 5, 6)).reason == "evicted"
    assert tree.explain(Namespace(), ids(1, 2, 7, 4, 5, 6)).reason == "differs"


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("n_changed", [1, 5, 40])
@pytest.mark.parametrize("inserted", [0, 3])
def test_a_prompt_that_comes_back_to_the_cached_text_is_told_from_one_that_is_new(
    page_size: int, n_changed: int, inserted: int
) -> None:
    tree, random = RadixTree(page_size), Random(1)
    cached = [random.randrange(1000) for _ in range(320)]
    insert(tree, ids(*cached), range(320 // page_size))
    start = 37
    nonce = [1000 + random.randrange(1000) for _ in range(n_changed + inserted)]
    same = [*cached[:start], *nonce, *cached[start + n_changed :]]
    new = [*cached[:start], *nonce, *(random.randrange(1000) for _ in range(280))]
    for prompt, comes_back in ((same, True), (new, False)):
        explanation = tree.explain(Namespace(), ids(*prompt))
        assert (explanation.reason, explanation.comes_back) == ("differs", comes_back)
    only_a_few_tokens = same[: start + len(nonce) + 8]
    assert not tree.explain(Namespace(), ids(*only_a_few_tokens)).comes_back
    assert not tree.explain(Namespace(), ids(*same), contents=False).comes_back


def test_pages_that_nobody_has_computed_are_dropped_without_a_trace() -> None:
    tree, n_pages = RadixTree(1), 0
    for tokens, n_computed in ((ids(1, 2), 1), (ids(1, 9), 1), (ids(5), 0)):
        lease = tree.lease(Namespace(), tokens)
        rest = tokens[4 * lease.n_tokens :]
        tree.commit(lease, rest, range(n_pages, n_pages + len(rest) // 4))
        tree.mark_computed(lease, n_computed)
        n_pages += len(rest) // 4
    tree.detach(Namespace())
    assert tree.explain(Namespace(), ids(1, 2)).reason == "never_seen"
    tree.check()
