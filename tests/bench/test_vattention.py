"""The benchmark of virtual memory: its arithmetic, and mapping, with a driver in host memory."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import DeviceError
from support.fake_cuda_driver import GRANULE, FakeCudaDriver
from support.paths import ROOT

BENCH = ROOT / "bench"
GRANULE_TOKENS = 1024
GIB = 1 << 30


@pytest.fixture(autouse=True, scope="module")
def bench() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.fixture
def driver() -> FakeCudaDriver:
    return FakeCudaDriver()


def ends(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Returns the exit code, or the message, with which the script ends."""
    monkeypatch.setattr(sys, "argv", ["vattention.py", *arguments])
    with pytest.raises(SystemExit) as end:
        module("vattention").main()
    return end.value.code


def test_help_and_wrong_use_need_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends(monkeypatch, "--help") == 0
    assert "--only PART" in capsys.readouterr().out
    assert ends(monkeypatch, "--only", "pages") == 2
    assert "invalid choice: 'pages'" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ends(monkeypatch) == "vattention.py needs an NVIDIA GPU, and torch finds none"


def test_missing_bindings_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(DeviceError, match="pip install 'cuda-bindings<14'") as failed:
        module("virtual_memory").load_driver()
    assert "\n" not in str(failed.value)


def test_memory_of_rows_with_a_common_prefix() -> None:
    rows = module("prefix_mapping").SharedRows(64, 4096, 256)
    page, granule = 16, GRANULE_TOKENS
    # 131,072 bytes a token in all layers: a page takes 2 MiB, a granule in each tensor 128 MiB
    assert rows.model_bytes(page, shares=False) == 64 * 272 * (2 << 20) == 34 * GIB
    assert rows.model_bytes(page, shares=True) == (256 + 64 * 16) * (2 << 20) == 2.5 * GIB
    assert rows.model_bytes(granule, shares=False) == 64 * 5 * (128 << 20) == 40 * GIB
    assert rows.model_bytes(granule, shares=True) == (4 + 64) * (128 << 20) == 8.5 * GIB
    # with all layers in one tensor, a granule of K and one of V hold 32 tokens
    assert rows.model_bytes(32, shares=True) == rows.model_bytes(page, shares=True)
    short = module("prefix_mapping").SharedRows(256, 1000, 256)
    assert short.model_bytes(32, shares=True) == (31 + 256 * 9) * (4 << 20)
    assert short.model_bytes(granule, shares=True) == short.model_bytes(granule, shares=False) == 64 * GIB
    assert short.model_bytes(page, shares=True) == (62 + 256 * 17) * (2 << 20)


@given(st.integers(1, 6), st.integers(0, 100), st.integers(1, 100), st.sampled_from([1, 16, 32, 64]), st.booleans())
def test_rows_share_what_the_prefix_fills_and_nothing_else(
    n_rows: int, n_prefix: int, n_own: int, unit_tokens: int, shares: bool
) -> None:
    rows = module("prefix_mapping").SharedRows(n_rows, n_prefix, n_own)
    tables = rows.tables(unit_tokens, shares=shares)
    tokens = [("prefix", i) if i < n_prefix else ("own", i) for i in range(n_prefix + n_own)]
    holders: dict[tuple[int, int], set[Any]] = {}
    for row in range(n_rows):
        for i, (kind, token) in enumerate(tokens):
            slot = (int(tables[row, i // unit_tokens]), i % unit_tokens)
            holders.setdefault(slot, set()).add(token if kind == "prefix" else (row, token))
    assert all(len(contents) == 1 for contents in holders.values()), "a slot has the same token in all its rows"
    assert tables.shape[1] * unit_tokens - len(tokens) < unit_tokens, "no unit of a row is empty"
    assert set(tables.flatten().tolist()) == set(range(int(tables.max()) + 1)), "all units are used"
    n_shared = sum(len(set(column)) == 1 for column in tables.T.tolist()) if n_rows > 1 else 0
    assert n_shared == (n_prefix // unit_tokens if shares and n_rows > 1 else 0)


def test_growth_of_rows_by_hand() -> None:
    line = module("granule_mapping").growth(256, GRANULE, {"create_us": 30.0, "map_us": 2.0, "allow_us": 8.0})
    assert (line["granules_per_row"], line["tokens"]) == (64, 1024)
    assert line["ms_per_row"] == 2.56  # 64 granules of 40 us
    assert line["granules_per_step"] == 16  # a row in every 4 steps
    assert (line["us_per_step"], line["us_per_step_created"]) == (640.0, 160.0)


def test_block_tables_of_layouts_cover_the_same_tokens() -> None:
    layouts = module("kv_layouts")
    rows = layouts.Rows(4, 64)
    tables = {order: layouts.Layout("triton", order, 16).tables(rows) for order in ("in order", "scattered")}
    assert tables["in order"].tolist() == np.arange(16).reshape(4, 4).tolist()
    assert sorted(tables["scattered"].flatten().tolist()) == list(range(16))
    assert tables["scattered"].tolist() != tables["in order"].tolist()
    assert layouts.Layout("triton", "contiguous", None).tables(rows).tolist() == [[0], [1], [2], [3]]
    assert [rows.name for rows in (layouts.Rows(8, 16), layouts.Rows(1, 512, 512), layouts.Rows(1, 512, 128))] == [
        "decode 8 x 16",
        "prompt 1 x 512",
        "prompt 1 x 128 after 384",
    ]


def test_sets_of_layers_in_one_tensor_interleave() -> None:
    layouts = module("kv_layouts")
    rows, memory = layouts.Rows(1, 4), torch.arange(12).view(12, 1, 1)
    one, all_layers = layouts.Layout("triton", "contiguous", None), layouts.Layout("triton", "contiguous", None, 3)
    assert [tokens.flatten().tolist() for tokens in one.sets(memory, rows)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    sets = all_layers.sets(memory, rows)
    assert [tokens.flatten().tolist() for tokens in sets] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert layouts.as_pages(sets[1], 2).flatten().tolist() == [1, 4, 7, 10]


def test_granules_of_all_layers_map_less_and_share_more(driver: FakeCudaDriver) -> None:
    """A granule of a tensor of 32 layers has 32 tokens, and a row needs two for them, not 64 for 1,024."""
    memories, prefixes = module("virtual_memory"), module("prefix_mapping")
    rows = prefixes.SharedRows(2, 70, 20)
    with memories.VirtualMemory(0, driver) as memory, pytest.MonkeyPatch.context() as patch:
        for name, value in (("free_memory", int), ("ROW_TOKENS", 1024)):
            patch.setattr(prefixes, name, value)
        patch.setattr(torch.cuda, "current_device", int)
        patch.setattr(
            prefixes, "tensor_at", lambda _, shape, dtype, __: torch.empty(shape, dtype=dtype, device="meta")
        )
        stored = prefixes.in_granules(rows, memory, shares=True, n_layers=32)
        n_created = len(driver.created)
        per_layer = prefixes.in_granules(rows, memory, shares=True)
    assert stored.line["shared_tokens"] == 64
    # the prefix fills 2 granules, and each row has one more, of K and of V
    assert n_created == 2 * (2 + 2 * 1)
    assert stored.line["mappings_per_row"] == 3 * 2
    assert stored.line["model_gib"] * 2**30 == pytest.approx(2 * 4 * GRANULE, rel=0.1)
    assert (len(stored.layers), stored.line["stored_layers"]) == (4, 32)
    assert stored.layers[1][0].stride() == (32 * 1024, 128, 1)
    assert (len(per_layer.layers), per_layer.line["mappings_per_row"]) == (4, 64)


def test_every_case_fills_whole_pages() -> None:
    script = module("vattention")
    for rows in script.LAYERED:
        assert rows.n_tokens * module("kv_layouts").N_HEADS // 4 * 128 * 32 < 2**31, (
            "the kernels take offsets in 32 bits"
        )
        assert all(rows.n_tokens % (layout.page_size or 1) == 0 for layout in script.LAYERED_LAYOUTS)
    for rows in script.SIZED:
        assert all(rows.n_tokens % page_size == 0 for page_size in script.PAGE_SIZES)
    for rows in (*script.DECODES, *script.PROMPTS):
        layouts = script.DECODE_LAYOUTS if rows.n_queries == 1 else script.PROMPT_LAYOUTS
        assert all(rows.n_tokens % (layout.page_size or 1) == 0 for layout in layouts)
        assert rows.n_queries <= rows.n_tokens
        assert 2 <= script.n_sets(rows) <= script.MAX_SETS
    prefixes = module("prefix_mapping")
    assert all(rows.n_tokens <= prefixes.ROW_TOKENS for rows in prefixes.SHARED)


def test_granules_mapped_into_many_rows_are_the_same_memory(driver: FakeCudaDriver) -> None:
    memories, prefixes = module("virtual_memory"), module("prefix_mapping")
    rows = prefixes.SharedRows(3, 2048, 10)
    tables = rows.tables(GRANULE_TOKENS, shares=True)
    row_bytes = 4 * GRANULE
    with memories.VirtualMemory(0, driver) as memory:
        first = memory.reserve(rows.n_rows * row_bytes)
        handles = [memory.create(GRANULE) for _ in range(int(tables.max()) + 1)]
        prefixes.map_rows(memory, tables, first, row_bytes, handles)
        assert (len(handles), len(driver.mapped)) == (2 + 3, 3 * 3)
        assert driver.accessible == set(driver.mapped)
        shape = (rows.n_rows, 4 * GRANULE_TOKENS, 1024)
        k = memories.tensor_at(first, shape, torch.bfloat16, torch.device("cpu"))
        k[0, :2048] = 1.0  # the prefix, through one row
        for row in range(rows.n_rows):
            k[row, 2048 : rows.n_tokens] = 2.0 + row
        for row in range(rows.n_rows):
            assert (k[row, :2048] == 1).all()
            assert (k[row, 2048 : rows.n_tokens] == 2 + row).all()
        assert k.data_ptr() == first
    assert driver.holds_nothing


def test_memory_is_given_back_after_an_error(driver: FakeCudaDriver) -> None:
    small = FakeCudaDriver(max_granules=2)
    memories = module("virtual_memory")

    def use_too_much() -> None:
        with memories.VirtualMemory(0, small) as memory:
            address = memory.reserve(4 * GRANULE)
            for index in range(3):
                memory.map(address + index * GRANULE, GRANULE, memory.create(GRANULE))

    with pytest.raises(DeviceError, match="^cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY$"):
        use_too_much()
    assert small.holds_nothing
    with memories.VirtualMemory(0, driver) as memory, pytest.raises(DeviceError, match="cuMemSetAccess"):
        memory.allow(memory.reserve(GRANULE), GRANULE)


@pytest.mark.parametrize(("n_ranges", "n_consecutive"), [(3, 1), (1, 4)])
def test_ranges_grow_by_granules(driver: FakeCudaDriver, n_ranges: int, n_consecutive: int) -> None:
    memories, mapping = module("virtual_memory"), module("granule_mapping")
    n_each = n_ranges * n_consecutive
    with memories.VirtualMemory(0, driver) as memory:
        mapper = mapping.Mapper(memory, n_ranges, n_consecutive, n_rounds=2)
        for n_mapped in (1, 2):
            mapper.map()
            assert len(driver.mapped) == len(driver.accessible) == n_mapped * n_each
        assert not mapper.has_room
        mapper.unmap()
        assert mapper.has_room
        assert len(driver.mapped) == len(driver.created) == n_each
        mapper.map()  # begins again at the first addresses
        mapper.unmap_all()
        assert not driver.mapped
        line = mapper.line()
        assert line["rounds"] == 3
        for name in ("create", "map", "allow", "unmap", "release"):
            assert 0 < line[f"{name}_us_min"] <= line[f"{name}_us"] <= line[f"{name}_us_max"]


def test_work_beside_steps_goes_on_until_they_end(driver: FakeCudaDriver) -> None:
    memories, mapping = module("virtual_memory"), module("granule_mapping")
    with memories.VirtualMemory(0, driver) as memory:
        done: list[int] = []
        with mapping.repeated_in_thread(memory, lambda: done.append(1)):
            while len(done) < 3:
                time.sleep(0.001)

        def fail() -> None:
            raise DeviceError("no memory")

        with pytest.raises(DeviceError, match="no memory"), mapping.repeated_in_thread(memory, fail):
            pass
