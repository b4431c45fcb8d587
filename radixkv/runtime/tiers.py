"""Opening of the memory tiers behind the KV pool, as the settings ask for them."""

from __future__ import annotations

from pathlib import Path

from radixkv.checkpoints import Checkpoint
from radixkv.checkpoints.fingerprint import fingerprint
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.cache.load_cost import LoadCost
from radixkv.runtime.cache.tiers.disk_tier import DiskTier
from radixkv.runtime.cache.tiers.file_store import FileStore
from radixkv.runtime.cache.tiers.page_keys import KVIdentity, root_key
from radixkv.runtime.cache.transfers import Transfers
from radixkv.runtime.device.resolved_config import ResolvedConfig
from radixkv.runtime.step.executor import Executor
from radixkv.tree.eviction import open_eviction_policy
from radixkv.tree.node import TOKEN_BYTES


def open_tiers(
    resolved: ResolvedConfig, checkpoint: Checkpoint, executor: Executor, cache: PageCache, host_memory_bytes: int
) -> Transfers:
    """Opens the host tier, and the disk tier if there is to be one. Raises ``ConfigError``."""
    policy = open_eviction_policy(resolved.eviction_policy, resolved.ghost_capacity)
    host, cost = PageCache(0, resolved.page_size, policy=policy), LoadCost()
    copier = executor.open_copier(host_memory_bytes)
    disk = None
    if resolved.cache_dir is not None:
        try:
            disk = DiskTier(
                host,
                FileStore(
                    Path(resolved.cache_dir),
                    page_bytes=copier.page_bytes,
                    page_token_bytes=resolved.page_size * TOKEN_BYTES,
                    max_bytes=resolved.cache_dir_bytes,
                ),
                root_key(_kv_identity(resolved, checkpoint, executor)),
                copier.buffer,
                cost,
            )
        except BaseException:
            copier.close()
            raise
    return Transfers(
        cache,
        host,
        copier,
        disk=disk,
        load_policy=resolved.load_policy,
        write_policy=resolved.write_policy,
        cost=cost,
    )


def _kv_identity(resolved: ResolvedConfig, checkpoint: Checkpoint, executor: Executor) -> KVIdentity:
    page = executor.page_format
    return KVIdentity(
        model=fingerprint(checkpoint.folder, resolved.load_format),
        device=page.device,
        processor=page.processor,
        torch_version=page.torch_version,
        dtype=executor.dtype,
        kv_scales="",
        layout=page.layout,
        page_size=resolved.page_size,
    )
