"""Bitwise equality of cold and warm, single and batched, whole and chunked runs, with free pages poisoned."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from radixkv.checkpoints import Checkpoint
from support.cases import covering, nightly_but
from support.device_support import INVARIANT, OpenDevice, random_ids, row_of
from support.poison import poison

Get = Callable[[str], Checkpoint]
PAGE = 4
BLOCK = 8
LENGTH = 75
IDS = random_ids(LENGTH, seed=11)
KINDS = ("grouped", "gemma4-shared", "gpt-oss", "qwen3-moe-alternating")
"""Names of checkpoints with attention of each kind, and with experts."""


def cold(device: OpenDevice, ids: list[int] = IDS) -> tuple[Tensor, Tensor]:
    """Returns the logits of all tokens and the stored KV, computed alone in one chunk."""
    pages = device.pages(len(ids))
    (logits,) = device.run(row_of(ids, pages))
    assert logits.isfinite().all()
    return logits, device.stored(pages, len(ids))


def equal(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize(("name", "chunk"), covering(INVARIANT, range(1, PAGE + 2)))
def test_chunked(checkpoint: Get, name: str, chunk: int) -> None:
    device = OpenDevice(checkpoint(name), page_size=PAGE, block_tokens=BLOCK)
    pages = device.pages(LENGTH)
    parts = [
        device.run(row_of(IDS, pages, start=start, stop=start + chunk))[0] for start in range(0, LENGTH, chunk)
    ]
    assert equal((torch.cat(parts), device.stored(pages, LENGTH)), cold(device))


@pytest.mark.parametrize(("name", "n_other_rows"), covering(INVARIANT, [1, 2, 6, 7, 8, 9, 40, 299]))
def test_decoding_in_a_batch(checkpoint: Get, name: str, n_other_rows: int) -> None:
    """Decodes the last token among rows of many lengths, some of which read its pages."""
    device = OpenDevice(checkpoint(name), page_size=PAGE, block_tokens=BLOCK, n_pages=40 + 17 * n_other_rows)
    expected, _ = cold(device)
    pages = device.pages(LENGTH)
    device.run(row_of(IDS, pages, stop=LENGTH - 1))
    prompts, other_rows = [], []
    for i in range(n_other_rows):
        ids = random_ids(3 + 7 * i % 50, seed=i)
        own = device.pages(len(ids) + 8)
        prompts.append(row_of(ids, own, batch_slot=i + 1))
        if i % 3 == 0:
            other_rows.append(
                row_of(IDS, pages, batch_slot=i + 1, start=8 + i % 40, stop=9 + i % 40, write_start=LENGTH)
            )
        else:
            other_rows.append(row_of(ids + ids[:1], own, batch_slot=i + 1, start=len(ids)))
    device.run(*prompts)
    middle = n_other_rows // 2
    rows = [*other_rows[:middle], row_of(IDS, pages, start=LENGTH - 1), *other_rows[middle:]]
    together = device.run(*rows)
    assert torch.equal(together[middle][0], expected[-1])
    for row, logits in zip(rows, together, strict=True):
        if row.write_start == LENGTH:
            assert torch.equal(logits[0], expected[row.start])


@pytest.mark.parametrize("name", nightly_but(INVARIANT, *KINDS))
def test_prompts_in_a_batch(checkpoint: Get, name: str) -> None:
    device = OpenDevice(checkpoint(name), page_size=PAGE, block_tokens=BLOCK)
    lengths = [1, 2, 9, 17, 33, 64, 100, 75]
    prompts = [random_ids(n, seed=n) for n in lengths]
    alone = [cold(device, ids) for ids in prompts]
    tables = [device.pages(n) for n in lengths]
    together = device.run(*(row_of(ids, tables[i], batch_slot=i) for i, ids in enumerate(prompts)))
    for i, ids in enumerate(prompts):
        assert equal((together[i], device.stored(tables[i], len(ids))), alone[i])


@pytest.mark.parametrize(("name", "hit"), covering(INVARIANT, [PAGE, 32, LENGTH - LENGTH % PAGE]))
def test_cache_hit(checkpoint: Get, name: str, hit: int) -> None:
    """A cache hit: another request computed the prefix, and the rest is written to new pages."""
    device = OpenDevice(checkpoint(name), page_size=PAGE, block_tokens=BLOCK)
    expected = cold(device)
    other = IDS[:hit] + random_ids(20, seed=12)
    shared_pages = device.pages(len(other))
    device.run(row_of(other, shared_pages))
    pages = shared_pages[: hit // PAGE] + device.pages(LENGTH - hit)
    (logits,) = device.run(row_of(IDS, pages, start=hit))
    assert torch.equal(logits, expected[0][hit:])
    assert torch.equal(device.stored(pages, LENGTH), expected[1])


@pytest.mark.parametrize("name", nightly_but(INVARIANT, *KINDS))
def test_pages_written_in_the_same_step(checkpoint: Get, name: str) -> None:
    device = OpenDevice(checkpoint(name), page_size=PAGE, block_tokens=BLOCK)
    expected = cold(device)
    writer = IDS[:40] + random_ids(20, seed=13)
    shared_pages = device.pages(len(writer))
    pages = shared_pages[:10] + device.pages(LENGTH - 40)
    _, logits = device.run(row_of(writer, shared_pages, batch_slot=1), row_of(IDS, pages, batch_slot=2, start=40))
    assert torch.equal(logits, expected[0][40:])
    assert torch.equal(device.stored(pages, LENGTH), expected[1])


@pytest.mark.parametrize("start", [72, 71, 40])
def test_recomputing_without_writing(checkpoint: Get, start: int) -> None:
    """A full cache hit recomputes tokens without writing their pages: same logits, unchanged pool."""
    device = OpenDevice(checkpoint("grouped"), page_size=PAGE, block_tokens=BLOCK)
    expected = cold(device)
    pages = device.pages(LENGTH)
    device.run(row_of(IDS, pages))
    before = device.pool.k.clone(), device.pool.v.clone()
    (logits,) = device.run(row_of(IDS, pages, batch_slot=3, start=start, write_start=LENGTH))
    assert torch.equal(logits, expected[0][start:])
    others = random_ids(LENGTH, seed=17)
    device.run(row_of(others, pages, batch_slot=3, start=start, write_start=LENGTH))
    for after, earlier in zip((device.pool.k, device.pool.v), before, strict=True):
        assert torch.equal(after.view(torch.int32), earlier.view(torch.int32))


def test_block_boundaries_of_the_default_size(checkpoint: Get) -> None:
    """Chunks that end before, at and after multiples of 256 positions."""
    ids = random_ids(530, seed=14)
    device = OpenDevice(checkpoint("grouped"), page_size=16)
    expected = cold(device, ids)
    pages = device.pages(len(ids))
    bounds = [0, 1, 254, 255, 256, 257, 300, 511, 512, 513, 530]
    parts = [device.run(row_of(ids, pages, start=a, stop=b))[0] for a, b in pairwise(bounds)]
    assert equal((torch.cat(parts), device.stored(pages, len(ids))), expected)


@pytest.mark.parametrize("page_size", [1, 3, 16, 300])
def test_chunked_with_other_page_sizes(checkpoint: Get, page_size: int) -> None:
    device = OpenDevice(checkpoint("grouped"), page_size=page_size)
    expected = cold(device)
    pages = device.pages(LENGTH)
    parts = [device.run(row_of(IDS, pages, start=a, stop=b))[0] for a, b in ((0, 30), (30, 31), (31, LENGTH))]
    assert equal((torch.cat(parts), device.stored(pages, LENGTH)), expected)


def test_two_threads(checkpoint: Get) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        test_block_boundaries_of_the_default_size(checkpoint)
        test_prompts_in_a_batch(checkpoint, "grouped")
        test_decoding_in_a_batch(checkpoint, "grouped", 7)
    finally:
        torch.set_num_threads(before)


@pytest.mark.nightly
class TestMutantsAreDetected:
    """Checks that the comparisons above detect errors."""

    def decode(self, device: OpenDevice, table: tuple[int, ...]) -> Tensor:
        return device.run(row_of(IDS, table, batch_slot=5, start=LENGTH - 1, write_start=LENGTH))[0][0]

    @pytest.fixture
    def device(self, checkpoint: Get) -> OpenDevice:
        return OpenDevice(checkpoint("grouped"), page_size=PAGE, block_tokens=BLOCK)

    @pytest.fixture
    def pages(self, device: OpenDevice) -> tuple[int, ...]:
        pages = device.pages(LENGTH)
        device.run(row_of(IDS, pages))
        return pages

    @pytest.mark.parametrize("wrong", [0, 7, 17])
    def test_one_wrong_page(self, device: OpenDevice, pages: tuple[int, ...], wrong: int) -> None:
        other = device.pages(LENGTH)
        device.run(row_of(random_ids(LENGTH, seed=15), other, batch_slot=1))
        table = pages[:wrong] + other[wrong : wrong + 1] + pages[wrong + 1 :]
        assert not torch.equal(self.decode(device, table), self.decode(device, pages))

    def test_an_unwritten_page(self, device: OpenDevice, pages: tuple[int, ...]) -> None:
        table = pages[:5] + device.pages(1) + pages[6:]
        assert self.decode(device, table).isnan().all()

    def test_two_pages_swapped(self, device: OpenDevice, pages: tuple[int, ...]) -> None:
        table = (pages[1], pages[0], *pages[2:])
        assert not torch.equal(self.decode(device, table), self.decode(device, pages))

    def test_a_stale_tail(self, device: OpenDevice, pages: tuple[int, ...]) -> None:
        """The block table's last entry still points to a page of the batch slot's previous request."""
        right = self.decode(device, pages)
        old = device.pages(LENGTH)
        device.run(row_of(random_ids(LENGTH, seed=16), old, batch_slot=2))
        assert not torch.equal(self.decode(device, (*pages[:-1], old[-1])), right)

    def test_positions_off_by_one(self, device: OpenDevice, pages: tuple[int, ...]) -> None:
        expected = self.decode(device, pages)
        row = row_of(IDS, pages, batch_slot=5, start=LENGTH - 1, write_start=LENGTH)
        assert not torch.equal(device.run(row, shift=-1)[0][0], expected)


def test_a_row_that_is_not_finite_does_not_affect_others(checkpoint: Get) -> None:
    device = OpenDevice(checkpoint("grouped"), page_size=PAGE, block_tokens=BLOCK)
    expected = cold(device)
    bad, good = device.pages(LENGTH), device.pages(LENGTH)
    device.run(row_of(IDS, good, batch_slot=1, stop=60))
    device.run(row_of(IDS, bad, batch_slot=0, stop=60))
    poison(device.pool, [bad[3]])
    poisoned, healthy = device.run(
        row_of(IDS, bad, batch_slot=0, start=60), row_of(IDS, good, batch_slot=1, start=60)
    )
    assert poisoned.isnan().all()
    assert torch.equal(healthy, expected[0][60:])
    poisoned, healthy = device.run(
        row_of(IDS, bad, batch_slot=0, start=74, write_start=LENGTH),
        row_of(IDS, good, batch_slot=1, start=74, write_start=LENGTH),
    )
    assert poisoned.isnan().all()
    assert torch.equal(healthy[0], expected[0][-1])
