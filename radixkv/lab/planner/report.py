"""The printed plan: each figure with the calculation that gives it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from radixkv.lab.bench.formatting import format_tokens, plural
from radixkv.lab.planner.plan import (
    GIB,
    BudgetPlan,
    Gpu,
    HostAdapters,
    PoolPlan,
    RequestShape,
    SchemePlan,
    StatePlan,
    WindowPlan,
)
from radixkv.lab.simulator.simulation import Result
from radixkv.lab.studies.paging.allocators import next_power_of_two
from radixkv.runtime.device.adapters.cuda.memory_size import SPARE_SLOTS
from radixkv.runtime.device.cuda.model_size import ModelSize
from radixkv.terminal import table

_UNITS = ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
LABEL_WIDTH = len("a request  ")
"""Characters of the label at the start of a line."""
_COLUMNS = ("scheme", "slots or pages a row", "rows at once", "longest context")


def model_lines(name: str, size: ModelSize, max_model_len: int, states: StatePlan) -> Iterator[str]:
    """Yields the lines about the model, its weights and its states."""
    yield f"{name}: {size.config.architecture}, {size.dtype_name}, contexts of up to {max_model_len:,} tokens"
    if size.n_ranks > 1:
        yield f"GPUs       {size.n_ranks}; bytes are those of each, and a token has KV on all"
    yield f"weights    {_weights(size)} = {_bytes(size.weight_bytes)}"
    if states.n_bytes:
        yield (
            f"states     ({plural(states.n_rows, 'row')} + {states.n_kept:,} in the cache) x "
            f"{plural(states.bytes_each, 'byte')} = {_bytes(states.n_bytes)}"
        )


def adapter_lines(max_loras: int, max_rank: int, n_bytes: int, host: HostAdapters, dtype: str) -> Iterator[str]:
    """Yields the lines about the slots of adapters, and about those in host memory."""
    yield (
        f"adapters   ({max_loras} + {plural(SPARE_SLOTS, 'spare slot')}) x "
        f"{n_bytes // (max_loras + SPARE_SLOTS):,} bytes of rank {max_rank} = {_bytes(n_bytes)}"
    )
    of_ranks = f" x {host.n_ranks} processes" if host.n_ranks > 1 else ""
    yield (
        f"           in host memory at most {host.n_most:,} x {host.bytes_each:,} bytes of files in "
        f"{dtype}{of_ranks} = {_bytes(host.n_bytes)}"
    )


def _weights(size: ModelSize) -> str:
    width = size.dtype.itemsize
    if not size.n_quantized_values:
        return f"{size.n_values:,} values x {width} bytes"
    n_dense = size.n_values - size.n_quantized_values
    quantized_bytes = size.n_quantized_values if size.has_fp8 else size.n_quantized_values // 2
    scale_bytes = size.weight_bytes - n_dense * width - quantized_bytes
    return (
        f"{n_dense:,} values x {width} bytes + {size.n_quantized_values:,} x {'1' if size.has_fp8 else '0.5'} + "
        f"{scale_bytes:,} for scales"
    )


def request_line(request: RequestShape, page_size: int) -> str:
    """Returns the line about a request's tokens and pages."""
    shared = ""
    if request.shared:
        n_shared = request.leased // page_size
        shared = f"; {request.leased:,} shared / {page_size} = {plural(n_shared, 'whole page')}"
    return (
        f"a request  {request.prompt:,} + {request.answer:,} - 1 = {plural(request.stored, 'token')} stored, "
        f"/ {page_size} rounded up = {plural(-(-request.stored // page_size), 'page')}{shared}"
    )


def pool_lines(
    pool: PoolPlan, size: ModelSize, gpu: Gpu, request: RequestShape, page_size: int, states: StatePlan
) -> Iterator[str]:
    """Yields the lines about the pool with one dtype of K and V."""
    dtype = size.dtype_name if pool.kv_cache_dtype == "auto" else pool.kv_cache_dtype
    yield f"KV in {dtype}"
    parts = (
        f"{part.n_layers} layers x {plural(part.n_kv_heads, 'KV head')} x {part.head_dim}"
        for part in size.page(page_size, pool.kv_cache_dtype).parts
    )
    yield (
        f"  a token  2 (K, V) x {_sum(parts)} x {plural(pool.value_bytes, 'byte')} = "
        f"{plural(pool.kv_bytes_per_token, 'byte')}"
    )
    yield f"  a page   {page_size} x {pool.kv_bytes_per_token:,} = {_bytes(pool.page_bytes)}"
    beside = f" - {states.n_bytes:,} states" if states.n_bytes else ""
    beside += f" - {gpu.adapter_bytes:,} adapters" if gpu.adapter_bytes else ""
    yield (
        f"  pool     {_usable(gpu)} - {size.weight_bytes:,} weights{beside} - {gpu.workspace_bytes:,} workspace "
        f"= {_bytes(pool.pool_bytes)}"
    )
    yield (
        f"           / {pool.page_bytes:,} - 1 page of padding = {plural(pool.n_pages, 'page')} "
        f"x {page_size} = {plural(pool.n_tokens, 'token')}"
    )
    if pool.n_host_slots is not None:
        yield _host_line(pool, page_size, request)
    if pool.windows is not None:
        yield _window_line(pool.windows)
    if pool.budget is not None:
        yield _budget_line(pool.budget, pool)


def scheme_table(pool: PoolPlan, request: RequestShape, page_size: int, max_model_len: int, n_rows: int) -> str:
    """Returns the table of what each scheme makes of the pool."""
    cells = [_cells(scheme, pool, request, page_size, max_model_len, n_rows) for scheme in pool.schemes]
    of_rows = f" of {plural(n_rows, 'row')}" if n_rows > 1 else ""
    return table((*_COLUMNS[:-1], _COLUMNS[-1] + of_rows), cells, align="<", indent=2)


def _sum(products: Iterator[str]) -> str:
    """Returns a factor: a product, or a sum of several in brackets."""
    terms = list(products)
    return terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"


def _usable(gpu: Gpu) -> str:
    if gpu.usable_bytes < int(gpu.n_bytes * gpu.utilization):
        return f"{gpu.n_bytes:,} - {gpu.n_bytes - gpu.usable_bytes:,} always free"
    return f"{gpu.utilization:g} x {gpu.n_bytes:,}"


def _host_line(pool: PoolPlan, page_size: int, request: RequestShape) -> str:
    n_slots, n_tokens = pool.n_host_slots, pool.n_host_tokens
    assert n_slots is not None
    assert n_tokens is not None
    row_pages = -(-request.stored // page_size)
    return (
        f"  host     {plural(n_slots, 'more page')} = {plural(n_tokens, 'token')}, cached only: "
        f"{n_tokens / pool.n_tokens:.3g} pools, / {row_pages} = {plural(n_slots // row_pages, 'whole request')}"
    )


def _window_line(windows: WindowPlan) -> str:
    n_each, n_shared = windows.pages_per_slab, windows.n_shared_pages
    a_row = f"{windows.n_pages_a_row - n_shared:,} / {n_each} + {windows.n_window_pages_a_row:,}"
    slabs = f"({windows.n_slabs:,} slabs - {n_shared:,} / {n_each})" if n_shared else f"{windows.n_slabs:,} slabs"
    return (
        f"  windows  {windows.n_layers} layers with windows of {windows.window:,} tokens with pages of their own: "
        f"{slabs} / ({a_row}) = {plural(windows.n_rows, 'row')} at once"
    )


def _budget_line(budget: BudgetPlan, pool: PoolPlan) -> str:
    units, a_row = f"{pool.n_pages:,}", f"{budget.n_pages_a_row:,}"
    if budget.n_shared_pages:
        units, a_row = (f"({one} - {budget.n_shared_pages:,})" for one in (units, a_row))
    own = ", with a kv_budget in each request" if budget.needs_own else ""
    return (
        f"  budget   answers that read {budget.kv_budget:,} tokens have at most "
        f"{plural(budget.n_pages_a_row, 'page')} each: {units} / {a_row} = {plural(budget.n_rows, 'row')} at once"
        f"{own}"
    )


def _cells(
    scheme: SchemePlan, pool: PoolPlan, request: RequestShape, page_size: int, max_model_len: int, n_rows: int
) -> tuple[str, str, str, str]:
    """Returns the cells of a scheme: what a row takes, rows, longest context."""
    answer_slots = next_power_of_two(request.answer)
    row_pages, shared_pages = -(-request.stored // page_size), request.leased // page_size
    taken, n_units, shared = f"{scheme.tokens_per_row:,}", pool.n_tokens, 0
    longest = f"{pool.n_tokens:,} / {n_rows}"
    if scheme.scheme == "reserve-power-of-two":
        taken = f"{request.prompt:,} + {answer_slots:,} = {request.prompt + answer_slots:,}"
        if request.prompt + answer_slots > max_model_len:
            taken += f", at most {max_model_len:,}"
        longest += f" - {answer_slots:,} + {request.answer:,}"
    elif scheme.scheme in ("paged", "radix"):
        n_units = pool.n_pages
        taken = f"{row_pages:,} pages"
        longest = f"{pool.n_pages:,} / {n_rows} x {page_size} + 1"
        if scheme.scheme == "radix" and shared_pages:
            shared = shared_pages
            taken = f"{row_pages:,} - {shared_pages:,} = {plural(row_pages - shared_pages, 'page')}"
            longest = f"(({pool.n_pages:,} - {shared:,}) / {n_rows} + {shared:,}) x {page_size} + 1"
    limit = ", the maximum" if scheme.longest_context == max_model_len else ""
    if scheme.reason == "windowed":
        return scheme.scheme, taken, f"{scheme.n_rows:,}, windowed", f"{scheme.longest_context:,}{limit}"
    per_row = scheme.tokens_per_row // (page_size if n_units == pool.n_pages else 1)
    units = f"({n_units:,} - {shared:,})" if shared else f"{n_units:,}"
    rows = f"{units} / {per_row:,} = {scheme.n_rows:,}"
    if scheme.reason == "states":
        rows = f"{scheme.n_rows:,}, limited by states"
    return (
        scheme.scheme,
        taken,
        rows,
        f"{longest} = {scheme.longest_context:,}" if not limit else f"{scheme.longest_context:,}{limit}",
    )


def hit_rate_lines(results: Sequence[Result], pools: Sequence[PoolPlan]) -> Iterator[str]:
    """Yields a line for the replay in each pool, and one for an infinite pool, which is the last result."""
    for result, pool in zip(results, pools, strict=False):
        host = (
            f" and {format_tokens(pool.n_host_tokens)} in the host tier" if pool.n_host_tokens is not None else ""
        )
        too_large = f"; {plural(result.n_too_large, 'request')} too large for it" if result.n_too_large else ""
        yield f"hit rate   {_rate(result)}, in {format_tokens(pool.n_tokens)} tokens{host}{too_large}"
    infinite = results[-1]
    most = format_tokens(infinite.most_cached_tokens)
    yield f"           {_rate(infinite)}, in an infinite pool, which would hold {most} tokens"


def remarks(
    pools: Sequence[PoolPlan], max_num_seqs: int, max_model_len: int, request: RequestShape
) -> Iterator[str]:
    """Yields remarks on what a server limits beside memory, and on how rows are counted."""
    for pool in pools:
        if pool.n_tokens < max_model_len:
            yield (
                f"with --kv-cache-dtype {pool.kv_cache_dtype} a server needs --max-model-len {pool.n_tokens} or "
                "less, so that the pool holds the longest request"
            )
    if any(scheme.n_rows > max_num_seqs for pool in pools for scheme in pool.schemes):
        yield f"a server runs at most {max_num_seqs} rows at once, unless --max-num-seqs allows more"
    yield (
        f"rows count as they are at their end; on the way there they hold {request.answer / 2:,.0f} tokens less on "
        "average"
    )


def _rate(result: Result) -> str:
    return f"{result.n_cached_tokens:,} / {result.n_prompt_tokens:,} prompt tokens = {result.hit_rate_pct:.1f}%"


def _bytes(n_bytes: int) -> str:
    size, unit = next(((size, unit) for size, unit in _UNITS if n_bytes >= size), _UNITS[-1])
    return f"{n_bytes:,} bytes ({n_bytes / size:.1f} {unit})"
