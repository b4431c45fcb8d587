"""The index of page files against a list that is searched."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixkv.runtime.tiers.stores.page_index import IndexedPage, PageIndex
from support.page_files import START, keys_of

RUNS = [[0], [0, 0], [0, 0, 0], [0, 1], [1]]
CHANGES = st.lists(
    st.tuples(st.sampled_from(["add", "touch", "remove", "make room", "spare", "restart"]), st.sampled_from(RUNS)),
    min_size=10,
    max_size=60,
)


def first_to_go(files: dict[bytes, IndexedPage], spared: list[bytes]) -> IndexedPage | None:
    parents = {key[32:] for key in files}
    leaves = [file for file in files.values() if file.key[:32] not in parents]
    others = [file for file in leaves if file.key not in spared]
    if leaves and not others:
        return max(leaves, key=lambda file: spared.index(file.key))
    return min(others, key=lambda file: file.tick, default=None)


def below(files: dict[bytes, IndexedPage], key: bytes) -> set[bytes]:
    found = {key[:32]}
    for _ in range(5):
        found |= {other[:32] for other in files if other[32:] in found}
    return {other for other in files if other[:32] in found}


@given(CHANGES)
def test_against_a_dict(changes: list[tuple[str, list[int]]]) -> None:
    files = {keys_of(run)[-1]: IndexedPage(keys_of(run)[-1], 1, tick) for tick, run in enumerate(RUNS)}
    index = PageIndex(files.values())
    spared: list[bytes] = []
    for tick, (change, run) in enumerate(changes, len(RUNS)):
        key = keys_of(run)[-1]
        if change == "add" and key not in files:
            files[key] = IndexedPage(key, 1 + tick % 3, tick)
            index.add(files[key])
        elif change == "touch":
            index.touch(key, tick)
            if key in files:
                files[key] = files[key]._replace(tick=tick)
        elif change == "remove":
            assert index.remove(key) == files.pop(key, None)
        elif change == "spare":
            spared = [] if key in spared[:1] else [*spared, key][-2:]
            index.spare(spared)
        elif change == "make room" and (oldest := first_to_go(files, spared)):
            assert index.first_to_go() == oldest
            assert index.remove(oldest.key) == files.pop(oldest.key)
        elif change == "restart":
            index, spared = PageIndex(files.values()), []
        assert (key in index) == (key in files)
        assert index.first_to_go() == first_to_go(files, spared)
        assert index.is_continued(key) == any(other[32:] == key[:32] for other in files)
        assert (len(index), index.n_bytes) == (len(files), sum(file.n_bytes for file in files.values()))
        assert sorted(index.files()) == sorted(files.values())
        assert {file.key for file in index.files_below(key)} == below(files, key)
    assert {file.key for file in index.files_below(START)} == below(files, START)
