"""Opening of the memory tiers behind the KV pool, as the settings ask for them."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

from radixkv.checkpoints import Checkpoint
from radixkv.checkpoints.fingerprint import fingerprint
from radixkv.errors import ConfigError, shortened
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.cache.page_quotas import PageQuotas
from radixkv.runtime.cache.window_pages import WindowPages
from radixkv.runtime.device.resolved_config import ResolvedConfig
from radixkv.runtime.step.executor import Executor
from radixkv.runtime.step.page_copier import PageCopier
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.runtime.tiers.copied_states import copied_states
from radixkv.runtime.tiers.host_tier import HostTier
from radixkv.runtime.tiers.load_choice import LoadChoice
from radixkv.runtime.tiers.load_cost import MIN_MEASURED_TOKENS, LoadCost
from radixkv.runtime.tiers.storage_tier import StorageTier
from radixkv.runtime.tiers.stores.file_store import FileStore
from radixkv.runtime.tiers.stores.object_store import ObjectStore
from radixkv.runtime.tiers.stores.page_keys import KVIdentity, root_key
from radixkv.runtime.tiers.stores.page_store import PageStore
from radixkv.runtime.tiers.stores.shared_cache import ObjectCache, SharedCache, SharedMemoryCache
from radixkv.runtime.tiers.stores.shared_memory.memory_store import SharedMemoryStore
from radixkv.tree.eviction_policies import open_eviction_policy
from radixkv.tree.node import TOKEN_BYTES
from radixkv.tree.states import BLOCK_TOKENS

_MEASURED_TOKENS = 512
"""Tokens of the steps that measure how fast the device computes prompts."""


def open_shared_cache(url: str) -> SharedCache:
    """Opens a store that servers share.

    Args:
        url: the setting ``cache_url``.

    Raises:
        ConfigError: its package is missing, or the store cannot be used.
    """
    if url.startswith("shm:"):
        return SharedMemoryCache(url)
    return ObjectCache(open_objects(url), url)


def open_objects(url: str) -> ObjectStore:
    """Opens the objects of a store that is no memory.

    Args:
        url: the setting ``cache_url``.

    Raises:
        ConfigError: its package is missing, or the store cannot be used.
    """
    if url.startswith("s3:"):
        _require("obstore", "s3", url)
        from radixkv.runtime.tiers.stores.s3_objects import S3Objects

        return S3Objects(url)
    if url.startswith("file:"):
        from radixkv.runtime.tiers.stores.folder_objects import FolderObjects

        return FolderObjects(url)
    _require("mooncake", "mooncake", url)
    from radixkv.runtime.tiers.stores.mooncake_objects import open_mooncake

    return open_mooncake(url)


def _require(package: str, extra: str, url: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"cache_url {shortened(url)} needs {package}; install radixkv[{extra}]")


def open_tiers(
    resolved: ResolvedConfig,
    checkpoint: Checkpoint,
    executor: Executor,
    cache: PageCache,
    host_memory_bytes: int,
    shared: SharedCache | None = None,
    *,
    page_quotas: PageQuotas | None = None,
) -> HostTier:
    """Opens the host tier, with the disk tier and the shared store if there are to be any. Closes all on failure.

    Args:
        resolved: the settings.
        checkpoint: the model.
        executor: the device, with its pool.
        cache: the page cache of the pool.
        host_memory_bytes: size of the host tier.
        shared: the store that servers share, which is closed with the tiers; None: there is none.
        page_quotas: divide the host tier's pages among tenants; None: nothing is divided.

    Raises:
        ConfigError: a tier does not fit the machine, or the folder cannot be used.
    """
    settings = resolved.device_settings
    policy = open_eviction_policy(resolved.config.cache.eviction_policy, resolved.config.cache.ghost_capacity)
    with ExitStack() as on_failure:
        copier = executor.open_copier(host_memory_bytes)
        on_failure.callback(copier.close)
        n_states = None if executor.n_states is None else copier.n_state_slots
        window_pages, block_tokens = None, BLOCK_TOKENS
        if executor.window_pool is not None:
            window_pages = WindowPages.of_host(executor.window_pool, settings.page_size, copier.n_slots)
            n_states = window_pages.slabs.n_slabs  # a tail has its last page alone
            block_tokens = settings.page_size
        host = PageCache(
            0,
            settings.page_size,
            policy=policy,
            page_quotas=page_quotas,
            n_states=n_states,
            state_block_tokens=block_tokens,
            window_pages=window_pages,
        )
        host.tree.history, host.tree.marks = cache.tree.history, cache.tree.marks
        state_buffers = copier.state_buffers if copier.n_state_slots else None
        n_state_pages = 0 if state_buffers is None else len(state_buffers(0))
        host_states, n_more = copied_states(host, n_state_pages), 0
        if host_states is not None:
            n_more = host_states.max_parts * host_states.pages_per_part
        if window_pages is not None:
            _check_windows(window_pages, copier, host_memory_bytes, settings.page_size)
        # A device with smaller steps takes so long for a token that little of them is fixed.
        min_tokens = min(MIN_MEASURED_TOKENS, settings.max_num_batched_tokens // 2)
        cost = LoadCost(n_more * settings.page_size, min_tokens)
        disk, stores, lender = None, list[PageStore](), None
        page_token_bytes = settings.page_size * TOKEN_BYTES
        if (cache_dir := resolved.config.cache.cache_dir) is not None:
            stores.append(
                FileStore(
                    Path(cache_dir),
                    page_bytes=copier.page_bytes,
                    page_token_bytes=page_token_bytes,
                    max_bytes=resolved.cache_dir_bytes,
                )
            )
            on_failure.callback(stores[0].close, timeout_s=0.0)
        if shared is not None:
            stores.append(shared.open_store(page_bytes=copier.page_bytes, page_token_bytes=page_token_bytes))
            on_failure.callback(stores[-1].close, timeout_s=0.0)
            if isinstance(stores[-1], SharedMemoryStore) and host_states is None:
                lender = stores[-1]
                copier.map_slots(lender.mapped_slots)
        if stores:
            max_tokens = min(settings.max_num_batched_tokens, settings.max_model_len)
            _measure_compute(executor, settings.page_size, max_tokens, cost)
            root = root_key(_kv_identity(resolved, checkpoint, executor))
            disk = StorageTier(host, stores, root, copier.buffer, cost, state_buffers, lender)
        host_tier = HostTier(
            cache,
            host,
            copier,
            disk=disk,
            choice=LoadChoice(resolved.config.cache.load_policy, cost),
            write_policy=resolved.config.cache.write_policy,
            n_state_pages=n_state_pages,
            max_row_tokens=settings.max_num_batched_tokens,
        )
        on_failure.pop_all()
    return host_tier


def _check_windows(windows: WindowPages, copier: PageCopier, n_bytes: int, page_size: int) -> None:
    """Raises ``ConfigError`` if the host tier has no room for a whole window and the pages before it."""
    n_slabs = -(-windows.window // page_size) + 1
    n_least = n_slabs * windows.slabs.pages_per_slab * copier.page_bytes
    if windows.slabs.n_slabs < n_slabs:
        raise ConfigError(
            f"host_memory_bytes {n_bytes} are less than a window of {windows.window} tokens takes, {n_least}, "
            "without which no prompt goes on; set --host-memory higher, or leave it out"
        )


def _measure_compute(executor: Executor, page_size: int, max_tokens: int, cost: LoadCost) -> None:
    """Measures how long a prompt's step takes, for the choice between disk and computing after a restart.

    Uses free pages of the pool, which nothing has been written to yet. Takes two steps of ``_MEASURED_TOKENS``.
    """
    n_tokens = min(_MEASURED_TOKENS, max_tokens, executor.n_pages * page_size)
    windows: tuple[int, ...] = ()
    if (pool := executor.window_pool) is not None:
        windows = tuple(range(pool.n_slabs, pool.n_slabs + -(-n_tokens // page_size)))
    row = Row(
        batch_slot=0,
        start=0,
        n_tokens=n_tokens,
        tokens=bytes(n_tokens * TOKEN_BYTES),
        write_start=0,
        table_start=0,
        table_pages=tuple(range(-(-n_tokens // page_size))),
        window_pages=windows,
        sampling=None,
    )
    executor.launch(StepPlan(0, (row,))).sample(None).result()  # the first step of a size takes longer
    started = perf_counter()
    executor.launch(StepPlan(1, (row,))).sample(None).result()
    cost.add_step(n_tokens, n_tokens, perf_counter() - started)


def _kv_identity(resolved: ResolvedConfig, checkpoint: Checkpoint, executor: Executor) -> KVIdentity:
    page, settings = executor.page_origin, resolved.device_settings
    return KVIdentity(
        model=fingerprint(checkpoint.folder, settings.load_format, settings.quantization),
        device=page.device,
        processor=page.processor,
        torch_version=page.torch_version,
        dtype=executor.dtype,
        kv_dtype=executor.kv_dtype,
        kv_scales=page.scales,
        layout=page.layout,
        page_size=settings.page_size,
    )
