"""Room that tenants share: its bounds hold, and one tenant takes nothing that is another's part."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from radixkv.runtime.pauses.shared_room import SharedRoom
from support.cases import examples

MAX_VALUES, MAX_BYTES = 6, 20
action = st.tuples(
    st.sampled_from(("put", "put", "put", "pop", "renew")),
    st.sampled_from(("a", "b", "c")),
    st.integers(0, 9),
    st.integers(0, 8),
)


@examples(400)
@given(actions=st.lists(action, max_size=40))
def test_the_one_with_the_most_gives_up_what_it_has_had_longest(actions: list[tuple[str, str, int, int]]) -> None:
    room: SharedRoom[int, int] = SharedRoom(MAX_VALUES, MAX_BYTES)
    kept: list[tuple[str, int, int, int]] = []
    """Tenant, key, value and bytes, in the order of the last use: the oracle."""
    for value, (verb, tenant, key, n_bytes) in enumerate(actions):
        found = [one for one in kept if one[1] == key]
        if verb == "renew" and found:
            room.renew(key)
            kept = [one for one in kept if one[1] != key] + found
        elif verb == "pop":
            assert room.pop(key) == (found[0][2] if found else None)
            kept = [one for one in kept if one[1] != key]
        elif verb == "put":
            kept = [*(one for one in kept if one[1] != key), (tenant, key, value, n_bytes)]
            for given_up in room.put(tenant, key, value, n_bytes):
                values = Counter(one[0] for one in kept)
                sizes = Counter(dict.fromkeys(values, 0))
                for one in kept:
                    sizes[one[0]] += one[3]
                (loser,) = (one for one in kept if one[2] == given_up)
                assert loser == next(one for one in kept if one[0] == loser[0])
                if len(kept) > MAX_VALUES:
                    assert values[loser[0]] == max(values.values())
                else:
                    assert sizes.total() > MAX_BYTES
                    assert sizes[loser[0]] == max(sizes.values())
                kept.remove(loser)
            assert len(kept) <= MAX_VALUES
            assert sum(one[3] for one in kept) <= MAX_BYTES
        assert dict(room.items()) == dict(room.in_any_order()) == {one[1]: one[2] for one in kept}
        assert len(room) == len(kept)
        assert [room.get(one) for one in range(10)] == [
            next((each[2] for each in kept if each[1] == one), None) for one in range(10)
        ]


def test_many_values_of_one_tenant_leave_those_of_another() -> None:
    room: SharedRoom[int, int] = SharedRoom(8)
    for number in range(4):
        room.put("few", number, number)
    for number in range(100, 1000):
        room.put("many", number, number)
    assert [value for _, value in room.items()] == [0, 1, 2, 3, 996, 997, 998, 999]
