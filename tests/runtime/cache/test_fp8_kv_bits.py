"""K and V of 8 bits: reused pages give the same bits as computed ones, from the device, the host tier and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv.checkpoints import Checkpoint
from support.cases import rest_nightly
from support.cold_answers import ColdAnswers
from support.cpu_server import CpuServer, Logits, ids
from support.evicting import evict_all

SHARED = ids(41, seed=0)
PROMPTS = {10 * seed: SHARED[: 12 + 7 * seed] + ids(3 + 5 * seed, seed) for seed in range(1, 5)}
N_TOKENS = 9
HOST_BYTES = 4 << 20


@pytest.fixture(scope="module")
def cold(checkpoint: Checkpoint) -> ColdAnswers:
    return ColdAnswers(checkpoint, PROMPTS, N_TOKENS, kv_cache_dtype="fp8")


def server_of(checkpoint: Checkpoint, **settings: Any) -> CpuServer:
    return CpuServer(checkpoint, kv_cache_dtype="fp8", **settings)


def serve_in_turn(server: CpuServer) -> None:
    for seed, prompt in PROMPTS.items():
        server.serve(seed, prompt, N_TOKENS)
        if server.host_tier is not None:
            server.finish_copies()


@pytest.mark.parametrize("budget", rest_nightly([10, 512], kept=(0,)))
def test_hits_on_the_device(checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits, budget: int) -> None:
    """Chunked and whole: a row reads the rounded K and V of its own step, as later ones do."""
    server = server_of(checkpoint, budget=budget)
    assert {part.k.dtype for part in server.executor.pool.parts} == {torch.float8_e4m3fn}
    for _ in range(2):
        serve_in_turn(server)
        cold.check(server, logits)
    assert all(output.n_cached > 0 for output in server.outputs.values())


def test_without_the_cache(checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits) -> None:
    server = server_of(checkpoint, shares=False)
    serve_in_turn(server)
    for seed in PROMPTS:
        assert server.outputs[seed].tokens == cold.outputs[seed].tokens
        assert all(torch.equal(logits[seed, index], cold.logits[seed, index]) for index in range(N_TOKENS))


def test_hits_in_the_host_tier(checkpoint: Checkpoint, cold: ColdAnswers, logits: Logits) -> None:
    server = server_of(checkpoint, n_pages=22, host_memory_bytes=HOST_BYTES)
    serve_in_turn(server)
    evict_all(server.cache)
    serve_in_turn(server)
    cold.check(server, logits)
    assert all(output.n_loaded >= 12 for output in server.outputs.values())


@pytest.mark.parametrize("second", rest_nightly(["fp8", "auto"], kept=(1,)))
def test_files_are_for_one_dtype(checkpoint: Checkpoint, tmp_path: Path, second: str) -> None:
    folder = tmp_path / "cache"
    for kv_cache_dtype in ("fp8", second):
        server = CpuServer(
            checkpoint, kv_cache_dtype=kv_cache_dtype, host_memory_bytes=HOST_BYTES, cache_dir=folder
        )
        serve_in_turn(server)
        server.loop.close()
    assert (server.outputs[40].n_loaded > 0) == (second == "fp8")


def test_a_page_takes_a_quarter_of_float32(checkpoint: Checkpoint) -> None:
    servers = [
        CpuServer(checkpoint, kv_cache_dtype=kv_cache_dtype, host_memory_bytes=HOST_BYTES)
        for kv_cache_dtype in ("auto", "fp8")
    ]
    page_bytes = [server.host_tier.copier.page_bytes for server in servers if server.host_tier is not None]
    assert page_bytes[0] == 4 * page_bytes[1]
