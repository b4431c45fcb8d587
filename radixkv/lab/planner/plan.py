"""The figures of a plan: the KV pool, and the rows that fit it by reservation scheme."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from radixkv.errors import ConfigError
from radixkv.lab.simulator.recording import Recording
from radixkv.lab.simulator.traffic import Traffic
from radixkv.lab.studies.paging.allocators import next_power_of_two
from radixkv.runtime.device.cuda.model_size import ModelSize
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.memory.copy_threads import count_slots
from radixkv.runtime.device.memory.cuda.pool_size import RESERVE_BYTES, MemoryUse, plan_pages
from radixkv.runtime.device.memory.page_shape import PageLayout
from radixkv.runtime.device.memory.slab_shape import are_mixed, slab_shape
from radixkv.runtime.device.memory.state_size import count_states
from radixkv.runtime.device.memory.state_slots import StateSlots
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.resolved_config import MAX_NUM_BATCHED_TOKENS
from radixkv.runtime.step.window_pool import max_window_pages
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.kv_budget import most_pages

SchemeName = Literal["reserve-maximum", "reserve-power-of-two", "paged", "radix"]
"""The schemes of docs/paging-study.md; ``radix`` is ``paged`` with the shared prefix held once."""
GIB = 1 << 30
_GB = 10**9


class RequestShape(NamedTuple):
    """The lengths of a typical request, in tokens."""

    prompt: int
    answer: int
    shared: int
    """Leading tokens of the prompt that all requests have in common."""

    @property
    def stored(self) -> int:
        """Tokens whose KV is stored at the end: all but the last token, whose KV is never read."""
        return self.prompt + self.answer - 1

    @property
    def leased(self) -> int:
        """Shared tokens that a request can lease: it computes at least one token of its prompt."""
        return min(self.shared, self.prompt - 1)


def typical_request(recording: Recording, answer: int | None) -> RequestShape:
    """Returns the mean lengths of a recording, and the prefix that all of its prompts share. O(prompts' symbols).

    Args:
        recording: the requests.
        answer: tokens of an answer; None takes the mean of the recording.

    Raises:
        ConfigError: the recording has no lengths of answers and ``answer`` is None, or it has them and it is not.
    """
    recorded = recording.answer_tokens
    if recorded is not None and answer is not None:
        raise ConfigError(f"{recording.name} says how long its answers are; leave --answer {answer} out")
    if recorded is None and answer is None:
        raise ConfigError(f"{recording.name} does not say how long its answers are; give --answer")
    traffic = recording.traffic
    mean_answer = answer if recorded is None else _rounded_mean(recorded)
    assert mean_answer is not None
    return RequestShape(_rounded_mean(traffic.n_tokens), mean_answer, _common_prefix(traffic))


def _rounded_mean(lengths: Sequence[int]) -> int:
    return max(1, round(sum(lengths) / len(lengths)))


def _common_prefix(traffic: Traffic) -> int:
    """Returns the tokens of the whole pages that all prompts begin with."""
    common = traffic.symbols(0)
    for index in range(1, len(traffic.n_tokens)):
        symbols = traffic.symbols(index)
        if not symbols.startswith(common):
            pairs = enumerate(zip(common, symbols, strict=False))
            common = common[: next((place for place, (one, other) in pairs if one != other), len(symbols))]
    return len(common) // (traffic.symbols_per_page * TOKEN_BYTES) * traffic.page_size


class Gpu(NamedTuple):
    """The GPU's memory, and what a server takes of it beside weights and KV."""

    n_bytes: int
    utilization: float
    """Share that a server may use."""
    workspace_bytes: int
    """Driver, largest step and CUDA graphs. A server measures it; a plan assumes it."""
    adapter_bytes: int = 0
    """Slots of LoRA adapters."""

    @property
    def taken_bytes(self) -> int:
        """Bytes that a server takes beside weights, states and KV."""
        return self.workspace_bytes + self.adapter_bytes

    @property
    def usable_bytes(self) -> int:
        """Bytes for weights, workspace and pool."""
        return min(int(self.n_bytes * self.utilization), self.n_bytes - RESERVE_BYTES)


class HostAdapters(NamedTuple):
    """The LoRA adapters that a server keeps in host memory, as their files have them."""

    n_most: int
    """Adapters that may be loaded at once."""
    bytes_each: int
    """Bytes of an adapter of all modules, of the highest rank."""
    n_ranks: int
    """Processes that each keep all of them."""

    @property
    def n_bytes(self) -> int:
        """Bytes of all of them, in all processes."""
        return self.n_most * self.bytes_each * self.n_ranks


class StatePlan(NamedTuple):
    """The states of recurrent layers, which a server allocates beside the pool; those of other models are empty."""

    n_rows: int
    """Rows that each have states: ``max_num_seqs``."""
    n_kept: int
    """States that the prefix cache keeps."""
    bytes_each: int

    @classmethod
    def of(cls, size: ModelSize, settings: DeviceSettings) -> StatePlan:
        """Returns those of a server with these settings. Raises ``ConfigError`` if the cache has room for none."""
        if size.config.recurrent is None:
            return cls(0, 0, 0)
        n_kept = count_states(size.config.recurrent, size.dtype, settings)
        return cls(settings.max_num_seqs, n_kept, size.state_bytes)

    @property
    def n_bytes(self) -> int:
        """Bytes of all of them."""
        return (self.n_rows + self.n_kept) * self.bytes_each


class SchemePlan(msgspec.Struct, frozen=True):
    """How many rows, and how long ones, a pool holds under a scheme."""

    scheme: SchemeName
    tokens_per_row: int
    """Token slots that only this row has, at its end."""
    n_rows: int
    """Requests that can all be at their end at once."""
    longest_context: int
    """Prompt and answer together, if as many rows run as were asked for, with the same answer and shared prefix."""
    reason: Literal["windowed", "states"] | None = None
    """Why ``n_rows`` is not the pool's pages by those of a row: layers with windows have pages of their own, or no
    more rows have states."""


class WindowPlan(msgspec.Struct, frozen=True):
    """How many rows a pool holds whose layers with windows have pages of their own (docs/decisions/0069)."""

    window: int
    """Positions that a token attends to in these layers."""
    n_layers: int
    """These layers."""
    pages_per_slab: int
    """Pages of the other layers in whose place a window page is."""
    n_slabs: int
    n_pages_a_row: int
    """Pages of the other layers that a row takes at its end."""
    n_window_pages_a_row: int
    """Window pages that it takes."""
    n_shared_pages: int
    """Pages of the other layers that all rows have in common."""
    n_rows: int
    """Requests that can all be at their end at once, with the shared prefix held once."""
    longest_context: int
    """See ``SchemePlan``."""


class BudgetPlan(msgspec.Struct, frozen=True):
    """How many rows a pool holds whose answers have a ``kv_budget`` (docs/decisions/0088)."""

    kv_budget: int
    """Most tokens that a row of an answer reads."""
    n_pages_a_row: int
    """Most pages that a row has at a time, with those of the shared prefix."""
    n_shared_pages: int
    n_rows: int
    """Requests that can all have so many at once, with the shared prefix held once."""
    needs_own: bool
    """Whether each request needs a ``kv_budget`` of its own, because it is longer than the pool."""


class PoolPlan(msgspec.Struct, frozen=True):
    """The pool with one dtype of K and V."""

    kv_cache_dtype: str
    """Value of the setting."""
    value_bytes: int
    kv_bytes_per_token: int
    page_bytes: int
    pool_bytes: int
    n_pages: int
    """Pages for requests; the page that pads block tables is not counted."""
    n_tokens: int
    n_host_slots: int | None
    """Pages in the host tier; None without one."""
    schemes: tuple[SchemePlan, ...]
    windows: WindowPlan | None = None
    """The same memory with window pages; None unless some layers have windows, and others none."""
    budget: BudgetPlan | None = None
    """The same pool with a ``kv_budget``; None without one."""

    @property
    def n_host_tokens(self) -> int | None:
        """Tokens in the host tier; None without one."""
        return None if self.n_host_slots is None else self.n_host_slots * (self.n_tokens // self.n_pages)


def plan_pool(
    size: ModelSize,
    gpu: Gpu,
    request: RequestShape,
    *,
    kv_cache_dtype: str,
    page_size: int,
    max_model_len: int,
    n_rows: int,
    host_bytes: int | None,
    states: StatePlan,
    kv_budget: int | None = None,
) -> PoolPlan:
    """Returns the pool that a server would have, and what each scheme makes of it.

    Args:
        size: size of the model, which ``check_fits`` has accepted.
        gpu: memory of each GPU.
        request: a typical request.
        kv_cache_dtype: value of the setting.
        page_size: tokens per page.
        max_model_len: most tokens of a prompt and an answer together.
        n_rows: rows at once for which the longest context is computed.
        host_bytes: size of the host tier; None: there is none.
        states: of recurrent layers.
        kv_budget: of each request; None: answers read all KV.

    Raises:
        ConfigError: no page fits the pool or the host tier, or so many rows have no states.
    """
    if 0 < states.n_rows < n_rows:
        raise ConfigError(f"rows is {n_rows}; states for {states.n_rows} rows fit, so give that or less")
    page = size.page(page_size, kv_cache_dtype)
    memory = MemoryUse(gpu.n_bytes, gpu.n_bytes - size.weight_bytes - states.n_bytes, gpu.taken_bytes)
    settings = DeviceSettings(
        page_size=page_size,
        max_num_seqs=n_rows,
        max_num_batched_tokens=page_size,
        max_model_len=1,
        gpu_memory_utilization=gpu.utilization,
    )
    n_pages = plan_pages(page, memory, settings)
    windows = None
    if host_bytes is None or size.n_ranks == 1:  # a server keeps all pages where ranks share a host tier
        windows = _windows(page, size.config, n_pages, request, max_model_len, n_rows)
    schemes = _schemes(n_pages, page_size, request, max_model_len, n_rows)
    return PoolPlan(
        kv_cache_dtype=kv_cache_dtype,
        value_bytes=page.dtype.itemsize,
        kv_bytes_per_token=page.n_bytes // page_size,
        page_bytes=page.n_bytes,
        pool_bytes=gpu.usable_bytes - size.weight_bytes - states.n_bytes - gpu.taken_bytes,
        n_pages=n_pages,
        n_tokens=n_pages * page_size,
        n_host_slots=None if host_bytes is None else _count_host_slots(host_bytes, size, page, n_pages, states),
        schemes=tuple(_with_states(_with_windows(scheme, windows), states) for scheme in schemes),
        windows=windows,
        budget=None if kv_budget is None else _with_budget(kv_budget, n_pages, page_size, request),
    )


def _with_windows(scheme: SchemePlan, windows: WindowPlan | None) -> SchemePlan:
    """Returns what a server makes of the pool where it has window pages: the other schemes have none."""
    if windows is None or scheme.scheme != "radix":
        return scheme
    return msgspec.structs.replace(
        scheme, n_rows=windows.n_rows, longest_context=windows.longest_context, reason="windowed"
    )


def _with_states(scheme: SchemePlan, states: StatePlan) -> SchemePlan:
    """Returns the scheme with no more rows than have states, whatever the pool holds."""
    if not states.n_rows or scheme.n_rows <= states.n_rows:
        return scheme
    return msgspec.structs.replace(scheme, n_rows=states.n_rows, reason="states")


def _with_budget(kv_budget: int, n_pages: int, page_size: int, request: RequestShape) -> BudgetPlan:
    n_row = min(-(-request.stored // page_size), most_pages(request.prompt, kv_budget, page_size))
    n_shared = request.leased // page_size
    n_rows = max(0, n_pages - n_shared) // (n_row - n_shared)
    needs_own = request.stored > n_pages * page_size
    return BudgetPlan(kv_budget, n_pages_a_row=n_row, n_shared_pages=n_shared, n_rows=n_rows, needs_own=needs_own)


def check_budget(size: ModelSize, max_model_len: int) -> None:
    """Raises ``ConfigError`` for a model or several GPUs with which a server refuses a ``kv_budget``."""
    config = size.config
    if config.recurrent is not None:
        what = "recurrent layers"
    elif any(window is not None for window in config.windows_within(max_model_len)):
        what = "layers with windows"
    elif size.n_ranks > 1:
        what = f"{size.n_ranks} GPUs"
    else:
        return
    raise ConfigError(f"kv_budget does not work with {what}; leave --kv-eviction and --kv-budget out")


def _windows(
    page: PageLayout, config: DecoderConfig, n_pages: int, request: RequestShape, max_model_len: int, n_rows: int
) -> WindowPlan | None:
    windows = config.windows_within(max_model_len)
    if not are_mixed(windows) or not config.has_one_shape_of_each_kind(max_model_len):
        return None
    n_tokens = MAX_NUM_BATCHED_TOKENS["cuda"]
    shape = slab_shape(page, windows, n_pages, max_row_tokens=n_tokens, max_model_len=max_model_len)
    if shape is None:
        return None
    n_row, n_shared = -(-request.stored // page.page_size), request.leased // page.page_size
    most_windows = max_window_pages(shape.window, 1, page.page_size)
    n_windows, n_own = min(n_row, most_windows), n_row - n_shared
    n_slabs, n_each = shape.n_slabs + shape.n_window_slabs, shape.pages_per_slab
    # A row's pages and window pages, as pages; slabs for windows only are of use to the first rows.
    n_fitting = (n_each * n_slabs - n_shared) // (n_own + n_each * n_windows)
    n_left, n_most = (n_each * n_slabs - n_shared) // n_rows, (shape.n_pages - n_shared) // n_rows
    n_longest = min(n_most, max(n_left - n_each * most_windows, min(n_left // (1 + n_each), most_windows)))
    longest = (n_longest + n_shared) * page.page_size + 1 if n_longest > 0 else 0
    return WindowPlan(
        window=shape.window,
        n_layers=shape.n_window_layers,
        pages_per_slab=n_each,
        n_slabs=n_slabs,
        n_pages_a_row=n_row,
        n_window_pages_a_row=n_windows,
        n_shared_pages=n_shared,
        n_rows=max(0, min(n_fitting, (shape.n_pages - n_shared) // n_own)),
        longest_context=min(max_model_len, longest),
    )


def _schemes(
    n_pages: int, page_size: int, request: RequestShape, max_model_len: int, n_rows: int
) -> tuple[SchemePlan, ...]:
    n_tokens, answer_slots = n_pages * page_size, next_power_of_two(request.answer)
    row_pages, shared_pages = -(-request.stored // page_size), request.leased // page_size
    slots_a_row = n_tokens // n_rows

    def scheme(name: SchemeName, per_row: int, pool: int, unit: int, longest: int) -> SchemePlan:
        return SchemePlan(name, per_row * unit, max(0, pool // per_row), min(max_model_len, max(0, longest)))

    def paged(name: SchemeName, shared: int) -> SchemePlan:
        own_pages = max(0, n_pages - shared) // n_rows
        # The KV of the last token needs no slot.
        longest = (own_pages + shared) * page_size + 1 if own_pages else 0
        return scheme(name, row_pages - shared, n_pages - shared, page_size, longest)

    power_slots = min(max_model_len, request.prompt + answer_slots)
    return (
        scheme("reserve-maximum", max_model_len, n_tokens, 1, slots_a_row),
        scheme("reserve-power-of-two", power_slots, n_tokens, 1, slots_a_row - answer_slots + request.answer),
        paged("paged", 0),
        paged("radix", shared_pages),
    )


def check_fits(
    size: ModelSize,
    in_fp8: ModelSize | None,
    divided: Iterable[ModelSize],
    gpu: Gpu,
    page_size: int,
    request: RequestShape,
    states: StatePlan,
) -> None:
    """Checks that each GPU holds its part of the model, the workspace and a page.

    Args:
        size: size of the model as it is to be served.
        in_fp8: size of the model rounded to FP8; None if it cannot be rounded.
        divided: sizes of the model on more GPUs; the first that fits is advised.
        gpu: memory of each GPU.
        page_size: tokens per page.
        request: a typical request, for the memory that is advised.
        states: of recurrent layers.

    Raises:
        ConfigError: the model does not fit. The error says how much memory is missing, and what would fit.
    """
    page = size.page(page_size, "auto")
    missing = _missing_bytes(size, gpu, page, states)
    if missing <= 0:
        return
    gpus = "a GPU" if size.n_ranks == 1 else f"{size.n_ranks} GPUs"
    advice = f"{gpus} of {_sufficient_gb(size, gpu, page, request, states)} GB would hold it with one request"
    n_gpus = (one.n_ranks for one in divided if _fits(one, gpu, page_size, states))
    if (n_enough := next(n_gpus, None)) is not None:
        advice = f"{n_enough} of these GPUs hold it (--gpus {n_enough}); {advice}"
    if in_fp8 is not None:
        fits = _missing_bytes(in_fp8, gpu, page, states) <= 0
        in_gib = f"--quantization fp8 makes the weights {in_fp8.weight_bytes / GIB:.1f} GiB"
        enough = "which fits" if fits else f"which needs {_sufficient_gb(in_fp8, gpu, page, request, states)} GB"
        advice = f"{in_gib}, {enough}; {advice}"
    kept_bytes = states.n_kept * states.bytes_each
    if kept_bytes > missing:
        advice = f"--state-memory {(kept_bytes - missing) // GIB}GiB fits; {advice}"
    on_each = "" if size.n_ranks == 1 else " on each GPU"
    raise ConfigError(f"{missing / GIB:.1f} GiB are missing{on_each}: {_needs(size, gpu, page, states)}; {advice}")


def _fits(divided: ModelSize, gpu: Gpu, page_size: int, states: StatePlan) -> bool:
    """Returns whether each GPU holds its part of a model that is divided among more of them, and of its states."""
    states = states._replace(bytes_each=divided.state_bytes)
    return _missing_bytes(divided, gpu, divided.page(page_size, "auto"), states) <= 0


def _count_host_slots(host_bytes: int, size: ModelSize, page: PageLayout, n_pages: int, states: StatePlan) -> int:
    """Returns how many pages a host tier has beside its states. Raises ``ConfigError`` if it has room for none."""
    page_bytes = size.n_page_parts * page.n_bytes
    if states.n_kept:
        host_bytes -= StateSlots(
            state_bytes=size.n_ranks * states.bytes_each,
            n_states=states.n_kept,
            page_bytes=page_bytes,
            n_pages=n_pages,
            n_bytes=host_bytes,
        ).n_bytes
    return count_slots(host_bytes, page_bytes)


def _missing_bytes(size: ModelSize, gpu: Gpu, page: PageLayout, states: StatePlan) -> int:
    return max(_served_bytes(size, gpu, page, states) - gpu.usable_bytes, _loaded_bytes(size) - gpu.n_bytes)


def _served_bytes(size: ModelSize, gpu: Gpu, page: PageLayout, states: StatePlan) -> int:
    """Returns the bytes of weights, states, adapters, workspace, and one page beside the one that pads."""
    return size.weight_bytes + states.n_bytes + gpu.taken_bytes + 2 * page.n_bytes


def _loaded_bytes(size: ModelSize) -> int:
    """Returns the bytes that are needed while the weights are loaded, before there is a pool."""
    return size.weight_bytes + size.loading_bytes


def _needs(size: ModelSize, gpu: Gpu, page: PageLayout, states: StatePlan) -> str:
    weights = f"the weights take {size.weight_bytes / GIB:.1f} GiB"
    if _served_bytes(size, gpu, page, states) - gpu.usable_bytes < _loaded_bytes(size) - gpu.n_bytes:
        return f"{weights} and converting them {size.loading_bytes / GIB:.1f}, and the GPU has {_size(gpu.n_bytes)}"
    if states.n_bytes:
        weights += f", the states {states.n_bytes / GIB:.1f}"
    if gpu.adapter_bytes:
        weights += f", the adapters {gpu.adapter_bytes / GIB:.1f}"
    return (
        f"{weights} and the workspace {gpu.workspace_bytes / GIB:.1f}, and {gpu.utilization:g} of "
        f"{_size(gpu.n_bytes)} is {gpu.usable_bytes / GIB:.1f} GiB"
    )


def _size(n_bytes: int) -> str:
    return f"{n_bytes / _GB:g} GB ({n_bytes / GIB:.1f} GiB)"


def _sufficient_gb(size: ModelSize, gpu: Gpu, page: PageLayout, request: RequestShape, states: StatePlan) -> int:
    """Returns whole gigabytes of GPU memory that hold the model and one request."""
    n_pages = -(-request.stored // page.page_size) + 1
    used = size.weight_bytes + states.n_bytes + gpu.taken_bytes + n_pages * page.n_bytes
    needed = max(used / gpu.utilization, used + RESERVE_BYTES, _loaded_bytes(size))
    return -int(-needed // _GB)
