"""Pages that have been on disk give the same bits as computed ones, with the real loop, CPU device and files.

Free pages are filled with NaN, as in the tests of the host tier.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.runtime.tiers.stores.file_store import FileStore
from radixkv.runtime.tiers.stores.page_file import PageFormat
from radixkv.runtime.tiers.stores.page_keys import KeyChain
from radixkv.runtime.tiers.stores.page_store import PageCounts
from radixkv.runtime.tiers.stores.page_value import DamagedPage, PageHeader
from radixkv.tree.node import Namespace
from radixkv.wire import cache_messages
from support.checkpoints import save_checkpoint
from support.cold_answers import ColdAnswers
from support.cpu_server import CpuServer, Logits, ids, recorded_logits
from support.evicting import evict_all
from support.page_files import TIMEOUT_S, page_files

PROMPTS = {10 * seed: ids(12 + 8 * seed, seed) for seed in range(1, 5)}
N_TOKENS = 9
HOST_BYTES = 4 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("model")
    save_checkpoint(path)
    return resolve(str(path))


@pytest.fixture(scope="module")
def cold(checkpoint: Checkpoint) -> ColdAnswers:
    return ColdAnswers(checkpoint, PROMPTS, N_TOKENS)


class Restarts:
    """Servers over one folder, one after the other, whose answers are compared with the cold ones."""

    def __init__(self, checkpoint: Checkpoint, folder: Path, cold: ColdAnswers, logits: Logits) -> None:
        self.checkpoint, self.folder, self.cold, self.logits = checkpoint, folder, cold, logits

    @contextmanager
    def server(self, **settings: Any) -> Iterator[CpuServer]:
        """A server whose pool holds about one prompt."""
        settings = {"n_pages": 22, "host_memory_bytes": HOST_BYTES, **settings}
        server = CpuServer(self.checkpoint, cache_dir=self.folder, **settings)
        try:
            yield server
        finally:
            server.loop.close()

    def ask(self, server: CpuServer, seeds: Iterable[int] = PROMPTS, **settings: Any) -> list[int]:
        """Serves prompts in turn and compares the answers; returns the prompt tokens that came from other tiers."""
        for seed in seeds:
            server.serve(seed, PROMPTS[seed], N_TOKENS, **settings)
            server.finish_copies()
            self.cold.check(server, self.logits, [seed], settings.get("salt", ""))
        return [server.outputs[seed].n_loaded for seed in seeds]

    def fill(self) -> list[Path]:
        """Runs a server that computes everything; returns the files that it has left."""
        with self.server() as server:
            assert self.ask(server) == [0] * len(PROMPTS)
        return page_files(self.folder)


@pytest.fixture
def restarts(checkpoint: Checkpoint, cold: ColdAnswers, tmp_path: Path) -> Iterator[Restarts]:
    with recorded_logits() as logits:
        yield Restarts(checkpoint, tmp_path / "cache", cold, logits)


WHOLE = [len(prompt) - 1 for prompt in PROMPTS.values()]
"""All tokens of each prompt but the last one, which is computed in any case."""


@pytest.mark.nightly
def test_pages_that_the_host_tier_has_evicted_come_from_disk(restarts: Restarts) -> None:
    with restarts.server() as server:
        restarts.ask(server)
        for _ in range(2):
            evict_all(server.cache)
            evict_all(server.host_tier.host)
            assert restarts.ask(server) == WHOLE
        assert server.disk.store.members[0].store.counts.n_lost == 0


@pytest.mark.nightly
def test_pages_are_fetched_and_loaded_while_their_requests_wait(restarts: Restarts) -> None:
    restarts.fill()
    with restarts.server(n_pages=100, max_rows=1) as server:
        server.add(99, ids(8, seed=99), 12)
        server.loop.turn()
        server.serve_all(PROMPTS, N_TOKENS)
        restarts.cold.check(server, restarts.logits, PROMPTS)
        assert [server.outputs[seed].n_loaded for seed in PROMPTS] == WHOLE
        host, *_ = server.scheduler.tiers.stats()
        assert host is not None
        assert host.pages_loaded_ahead_used_by_waiting_total > 0


def test_pages_outlive_the_server(restarts: Restarts) -> None:
    restarts.fill()
    for _ in range(2):
        with restarts.server() as server:
            assert restarts.ask(server) == WHOLE
            assert server.disk.store.members[0].store.counts.n_written == 0, "a page was written that is on disk"


def test_two_requests_join_one_fetch(restarts: Restarts) -> None:
    restarts.fill()
    with restarts.server(n_pages=60) as server:
        server.add(40, PROMPTS[40], N_TOKENS)
        server.serve(41, PROMPTS[40], N_TOKENS)
        assert server.outputs[40].tokens == restarts.cold.outputs[40].tokens
        assert server.outputs[41].n_cached == server.outputs[40].n_cached == WHOLE[3]
        assert server.disk.counters.n_pages_loaded == len(PROMPTS[40]) // 4


def test_a_salt_has_pages_of_its_own(restarts: Restarts) -> None:
    restarts.fill()
    with restarts.server() as server:
        assert restarts.ask(server, salt="a") == [0] * len(PROMPTS)
    with restarts.server() as server:
        assert restarts.ask(server, salt="b") == [0] * len(PROMPTS)
        assert restarts.ask(server, salt="a") == WHOLE


def test_another_model_finds_nothing(restarts: Restarts, tmp_path: Path) -> None:
    restarts.fill()
    save_checkpoint(tmp_path / "other", rms_norm_eps=0.01)
    other = CpuServer(resolve(str(tmp_path / "other")), host_memory_bytes=HOST_BYTES, cache_dir=restarts.folder)
    other.add(10, PROMPTS[10], N_TOKENS)
    other.run()
    other.loop.close()
    assert other.outputs[10].n_cached == 0


def test_a_damaged_page_is_computed(restarts: Restarts) -> None:
    """Flips a bit of the KV in every file."""
    for file in restarts.fill():
        contents = bytearray(file.read_bytes())
        contents[-100] ^= 1 << 6
        file.write_bytes(contents)
    with restarts.server() as server:
        assert restarts.ask(server) == [0] * len(PROMPTS)
        assert server.disk.store.members[0].store.counts.n_lost > 0


def test_one_damaged_page_is_one_lost_and_one_written(restarts: Restarts) -> None:
    """The pages behind it stay on disk, and are found again once it is computed and written."""
    with restarts.server(n_pages=60) as server:
        assert restarts.ask(server, [40]) == [0]
    files = sorted(page_files(restarts.folder), key=lambda file: file.stat().st_mtime_ns)
    damaged = bytearray(files[3].read_bytes())
    damaged[-100] ^= 1
    files[3].write_bytes(damaged)
    before = {file: file.read_bytes() for file in files}
    with restarts.server(n_pages=60) as server:
        (n_loaded,) = restarts.ask(server, [40])
        assert n_loaded < WHOLE[3]
    assert server.disk.store.members[0].store.counts == PageCounts(n_written=1, n_lost=1)
    changed = [file for file in files if file.read_bytes() != before[file]]
    assert changed == [files[3]]
    with restarts.server(n_pages=60) as server:
        assert restarts.ask(server, [40]) == [WHOLE[3]]
        assert server.disk.store.members[0].store.counts == PageCounts()


@pytest.mark.parametrize("call", ["read", pytest.param("write", marks=pytest.mark.nightly)])
def test_a_disk_that_hangs_holds_neither_requests_nor_pages_nor_the_end(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    for name in ("transfer_threads.STUCK_S", "transfer_threads.LAST_STEP_S", "file_store.LOAD_TIMEOUT_S"):
        monkeypatch.setattr(f"radixkv.runtime.tiers.stores.{name}", 0.2)
    if call == "read":
        restarts.fill()
    lets_go, function = threading.Event(), getattr(PageFormat, call)

    def hang(*args: Any) -> None:
        assert lets_go.wait(TIMEOUT_S)
        function(*args)

    threads = set(threading.enumerate())
    with restarts.server() as server:
        monkeypatch.setattr(PageFormat, call, hang)
        assert restarts.ask(server) == [0] * len(PROMPTS)
        server.loop.check()
        host = server.host_tier.host
        assert host.n_available == host.n_pages, "the slots are free again"
        if call == "write":
            restarts.ask(server)
        began = time.monotonic()
    assert time.monotonic() - began < TIMEOUT_S / 2
    lets_go.set()
    for thread in set(threading.enumerate()) - threads:
        thread.join(TIMEOUT_S)


def test_another_pages_file_is_not_taken_for_a_page(restarts: Restarts) -> None:
    """Exchanges the contents of the files in a circle."""
    files = restarts.fill()
    contents = [file.read_bytes() for file in files]
    for file, other in zip(files, [*contents[1:], contents[0]], strict=True):
        file.write_bytes(other)
    with restarts.server() as server:
        assert restarts.ask(server) == [0] * len(PROMPTS)


@pytest.mark.nightly
def test_what_is_before_a_lost_page_is_loaded(restarts: Restarts) -> None:
    files = restarts.fill()
    for file in sorted(files, key=lambda file: file.stat().st_mtime_ns)[1::2]:
        file.unlink()
    with restarts.server() as server:
        restarts.ask(server)
    with restarts.server() as server:
        assert restarts.ask(server) == WHOLE, "what was computed again is not on disk again"


def test_pages_that_cannot_be_read_now_are_computed(restarts: Restarts) -> None:
    """A folder in place of a file: an error after which the store keeps the page, as it may be gone next time."""
    restarts.fill()
    with restarts.server() as server:
        for file in page_files(restarts.folder):
            file.unlink()
            file.mkdir()
        assert restarts.ask(server) == [0] * len(PROMPTS)


def test_a_flush_empties_the_folder(restarts: Restarts) -> None:
    assert restarts.fill()
    with restarts.server() as server:
        server.add(40, PROMPTS[40], N_TOKENS)
        server.loop.turn()
        assert server.disk.is_busy, "no fetch is in flight"
        server.loop.receive(cache_messages.Flush("f"))
        server.run()
        server.finish_copies()
        assert server.outputs[40].n_loaded == 0
        assert server.outputs[40].tokens == restarts.cold.outputs[40].tokens
        server.loop.receive(cache_messages.Flush("f"))
        assert select.select(server.disk.store.descriptors(), [], [], TIMEOUT_S)[0], "the flush does not finish"
        server.loop.advance()
        assert not select.select(server.disk.store.descriptors(), [], [], 0)[0], (
            "an idle server would turn without end"
        )
    assert page_files(restarts.folder) == []


@pytest.mark.nightly
def test_a_host_tier_smaller_than_a_prompt(restarts: Restarts) -> None:
    restarts.fill()
    with restarts.server() as server:
        page_bytes = server.host_tier.copier.page_bytes
    with restarts.server(host_memory_bytes=8 * page_bytes) as server:
        n_loaded = restarts.ask(server)
        assert n_loaded[0] == WHOLE[0]
        assert n_loaded[3] == 8 * 4, "of 11 pages, 8 come through 8 slots"


def ignore_the_checksum(patch: pytest.MonkeyPatch) -> None:
    make = PageHeader.make

    def check(self: PageHeader, header: memoryview, key: bytes, tokens: bytes, page: memoryview) -> None:
        if header[:-16] != make(self, key, tokens, page)[:-16]:
            raise DamagedPage

    patch.setattr(PageHeader, "check", check)


def ignore_the_key_and_tokens(patch: pytest.MonkeyPatch) -> None:
    make, check = PageHeader.make, PageHeader.check
    patch.setattr(
        PageHeader, "make", lambda self, key, tokens, page: make(self, bytes(64), bytes(len(tokens)), page)
    )
    patch.setattr(
        PageHeader,
        "check",
        lambda self, header, key, tokens, page: check(self, header, bytes(64), bytes(len(tokens)), page),
    )


def believe_a_failed_fetch(patch: pytest.MonkeyPatch) -> None:
    load, take_finished = FileStore.load, FileStore.take_finished
    n_asked: dict[tuple[FileStore, int], int] = {}

    def mutant(self: FileStore, keys: Sequence[bytes], tokens: bytes, buffers: Sequence[memoryview]) -> int:
        ticket = load(self, keys, tokens, buffers)
        n_asked[self, ticket] = len(keys)
        return ticket

    patch.setattr(FileStore, "load", mutant)
    patch.setattr(
        FileStore,
        "take_finished",
        lambda self: [
            one._replace(n_pages=n_asked.get((self, one.ticket), one.n_pages)) for one in take_finished(self)
        ],
    )


def forget_the_salt(patch: pytest.MonkeyPatch) -> None:
    keys = KeyChain.keys
    patch.setattr(KeyChain, "keys", lambda self, namespace, tokens: keys(self, Namespace(), tokens))


MUTANTS: tuple[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Restarts], None]], ...] = (
    (ignore_the_checksum, test_a_damaged_page_is_computed),
    (ignore_the_key_and_tokens, test_another_pages_file_is_not_taken_for_a_page),
    (believe_a_failed_fetch, test_a_damaged_page_is_computed),
    (forget_the_salt, test_a_salt_has_pages_of_its_own),
)


@pytest.mark.nightly
@pytest.mark.parametrize(("mutant", "test"), MUTANTS, ids=lambda one: one.__name__)
def test_each_mutant_is_found(
    restarts: Restarts,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[pytest.MonkeyPatch], None],
    test: Callable[[Restarts], None],
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test(restarts)
