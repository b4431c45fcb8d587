"""Marks: keys, and what they stand for, against lists of numbers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import CheckpointError, InvariantError
from radixkv.tree.marks import Marks
from radixkv.tree.node import Namespace
from radixkv.tree.radix_tree import RadixTree
from support.cases import rest_nightly

JUDGE, RANK = "0badcafe" + "1" * 56, "0badcaff" + "2" * 56
TOKENS = st.lists(st.sampled_from([0, 1, 2, 256, 65536, 1 << 24]), max_size=12)


def packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def unpacked(key: bytes) -> list[int]:
    return array("i", key).tolist()


def last_place(tokens: Sequence[int], invocation: Sequence[int]) -> int | None:
    places = [at for at in range(len(tokens)) if tokens[at : at + len(invocation)] == invocation]
    return places[-1] if places else None


@given(TOKENS, st.lists(st.sampled_from([0, 1, 256, 1 << 24]), min_size=1, max_size=3))
def test_the_last_invocation_begins_with_a_mark(tokens: list[int], invocation: list[int]) -> None:
    """Bytes of two tokens may look like one of the invocation's."""
    marks = Marks()
    marks.add(JUDGE, invocation)
    key, position = marks.key(JUDGE, packed(tokens))
    assert position == last_place(tokens, invocation)
    if position is None:
        assert key == packed(tokens)
        assert marks.find(key) == []
        return
    numbers = unpacked(key)
    assert numbers[position] < -1
    assert [*numbers[:position], *numbers[position + 1 :]] == [*tokens[:position], *tokens[position + 1 :]]
    assert marks.tokens(key) == packed(tokens)
    assert marks.find(key) == [(position, (JUDGE, packed(invocation[:1])))]
    assert marks.tokens(key[4 * position :]) == packed(tokens[position:]), "a part of a key"


@given(TOKENS, st.lists(st.sampled_from([0, 1]), min_size=1, max_size=3), st.integers(0, 12))
def test_every_key_begins_with_one_of_the_prefixes(tokens: list[int], invocation: list[int], end: int) -> None:
    marks = Marks()
    marks.add(JUDGE, invocation)
    key, prefix = marks.key(JUDGE, packed(tokens)).key, packed(tokens[:end])
    prefixes = list(marks.prefixes(JUDGE, prefix))
    assert key[: len(prefix)] in prefixes
    assert all(marks.tokens(one) == prefix for one in prefixes)


PAGE = 3


def pages_of(keys: Sequence[bytes]) -> set[bytes]:
    return {key[:end] for key in keys for end in range(4 * PAGE, len(key) + 1, 4 * PAGE)}


def add(tree: RadixTree, keys: Sequence[bytes]) -> None:
    """Adds the whole pages of sequences, computed."""
    numbers = count()
    for key in keys:
        lease = tree.lease(Namespace(), key)
        rest = key[4 * lease.n_tokens : len(key) - len(key) % (4 * PAGE)]
        tree.commit(lease, rest, [next(numbers) for _ in range(len(rest) // (4 * PAGE))])
        tree.mark_computed(lease, len(key) // 4)
        tree.release(lease)


@pytest.mark.parametrize("seed", rest_nightly(range(400), kept=range(60)))
def test_prefixes_drop_a_conversation_with_its_earlier_turns_and_nothing_else(seed: int) -> None:
    """A conversation that the model and an adapter answer, beside others, against a list of all that is cached."""
    random = Random(seed)

    def some(n: int) -> list[int]:
        return random.choices([0, 1, 2], k=random.randint(0, n))

    marks, tree = Marks(), RadixTree(PAGE)
    invocation = random.choices([0, 1], k=random.randint(1, 3))
    for adapter in (JUDGE, RANK):
        marks.add(adapter, invocation)
    history, cached = list[int](), list[bytes]()
    for _ in range(random.randint(1, 5)):
        prompt = [*history, *some(7), *invocation]
        history = [*prompt, *some(7)]
        turns = (random.choice(["", JUDGE]), history), ("", [*prompt, *some(7)]), (JUDGE, history)
        for adapter, sequence in turns:
            if random.random() < 0.6:
                cached.append(marks.key(adapter, packed(prompt)).key + packed(sequence[len(prompt) :]))
    for adapter in ("", JUDGE, RANK):
        cached.append(marks.key(adapter, packed([*history[: random.randint(0, 9)], *some(9)])).key)
    add(tree, cached)
    before = pages_of(cached)
    leaves = [one for one in before if not any(other != one and other.startswith(one) for other in before)]
    prefix = packed(history[: random.randint(1, max(1, len(history) // PAGE)) * PAGE])

    def is_of_the_conversation(leaf: bytes) -> bool:
        for place, mark in marks.find(leaf):
            text = unpacked(prefix)[place : place + len(invocation)]
            if text and (mark.adapter != JUDGE or text != invocation[: len(text)]):
                return False
        tokens = marks.tokens(leaf)
        return tokens.startswith(prefix) or prefix.startswith(tokens)

    for key in marks.prefixes(JUDGE, prefix):
        tree.detach(Namespace(), key)
    kept = pages_of([leaf for leaf in leaves if not is_of_the_conversation(leaf)])
    assert {one for one in before if tree.match(Namespace(), one) * 4 == len(one)} == kept
    tree.check()


def test_each_adapter_has_its_own_mark_which_depends_on_its_digest_alone() -> None:
    marks, others = Marks(), Marks()
    assert (len(marks), JUDGE in marks, marks.find(packed([1, -1, 2]))) == (0, False, [])
    for one in (JUDGE, RANK):
        marks.add(one, [5])
    for one in (RANK, JUDGE, JUDGE):
        others.add(one, [5])
    prompt = packed([4, 5, 6])
    keys = [one.key(adapter, prompt).key for one in (marks, others) for adapter in (JUDGE, RANK)]
    assert keys[:2] == keys[2:]
    assert len(set(keys)) == 2
    assert dict(marks.recent_keys("", prompt)) == {JUDGE: keys[0], RANK: keys[1]}
    assert dict(marks.recent_keys("", packed([4, 6]))) == {}
    assert marks.key("", prompt) == marks.key("3" * 64, prompt) == (prompt, None)
    assert marks.tokens(b"\xff" * 8) == b"\xff" * 8, "no tokens, as of pages of states"
    with pytest.raises(InvariantError, match="a key has the mark -7, which no adapter has"):
        marks.find(packed([4, -7]))


@given(TOKENS, st.lists(st.sampled_from([0, 1]), min_size=1, max_size=3))
def test_recent_keys_are_those_of_the_last_two_invocations(tokens: list[int], invocation: list[int]) -> None:
    """Of loaded adapters, and of the one that asks; a mark is that of its adapter for ever."""
    marks = Marks()
    for adapter in (JUDGE, RANK):
        marks.add(adapter, invocation)
    places = [at for at in range(len(tokens)) if tokens[at : at + len(invocation)] == invocation]

    def recent(adapter: str) -> list[tuple[str, int]]:
        found = [(one, marks.find(key)) for one, key in marks.recent_keys(adapter, packed(tokens))]
        assert all(len(one) == 1 and one[0][1].adapter == adapter for adapter, one in found)
        return [(adapter, place) for adapter, ((place, _),) in found]

    both = [(adapter, place) for adapter in (JUDGE, RANK) for place in places[:-3:-1]]
    assert recent("") == recent(JUDGE) == both
    marks.unload(RANK)
    marks.unload("3" * 64)
    assert len(marks) == 1
    assert recent("") == recent(JUDGE) == both[: len(both) // 2]
    assert recent(RANK) == both
    marks.add(RANK, invocation)
    assert recent("") == both


def test_another_adapter_of_the_same_mark_is_refused() -> None:
    marks = Marks()
    marks.add(JUDGE, [5])
    same = JUDGE[:8] + "2" * 56
    with pytest.raises(CheckpointError, match="0badcafe2222… has the mark of 0badcafe1111…"):
        marks.add(same, [5])
    assert same not in marks
    assert marks.key(same, packed([5])) == (packed([5]), None)


@pytest.mark.parametrize("digits", ["00000000", "7ffffffe", "7fffffff", "ffffffff"])
def test_marks_are_negative_int32_and_never_minus_one(digits: str) -> None:
    marks = Marks()
    marks.add(digits + "0" * 56, [5])
    assert -(2**31) <= unpacked(marks.key(digits + "0" * 56, packed([5])).key)[0] < -1
