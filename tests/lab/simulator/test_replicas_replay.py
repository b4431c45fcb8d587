"""The simulator predicts where a server places prompts among its replicas, and what they find there."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from itertools import chain, zip_longest
from pathlib import Path

import pytest

from radixkv.checkpoints import resolve
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.metrics.prometheus import Metrics
from radixkv.frontend.miss_counts import MissRecord
from radixkv.frontend.replicas.client import ReplicasClient
from radixkv.frontend.replicas.placement import Placement
from radixkv.frontend.runtime_client import RuntimeClient
from radixkv.lab.bench.workloads.base import Source
from radixkv.lab.simulator.recording import read_recording
from radixkv.runtime.device.factory import look_at_machine, resolve_config
from radixkv.runtime.open_loop import open_loop
from radixkv.runtime.process import RuntimeServer, open_socket
from radixkv.settings.config import CacheConfig, EngineConfig, ModelConfig
from radixkv.wire.messages import Submit
from radixkv.wire.sampling import SamplingParams
from support.cases import rest_nightly
from support.json_lines import write_lines
from support.live import LIMIT_S
from support.sessions import collect_turns, make

N_REPLICAS = 2


def write_log(file: Path, workload: str, **parameters: int) -> Path:
    """Writes the requests of a workload whose sessions take turns; returns the file."""
    sessions = make(workload, Source(), **parameters).sessions
    in_turn = chain.from_iterable(zip_longest(*(chain.from_iterable(collect_turns(one)) for one in sessions)))
    requests = [request for request in in_turn if request is not None]
    fields = ("prompt" if isinstance(one.prompt, str) else "messages" for one in requests)
    lines = [{field: one.prompt, "tools": [*one.tools]} for field, one in zip(fields, requests, strict=True)]
    return write_lines(file, *lines)


@asynccontextmanager
async def replicas(folder: Path, n_tokens: int) -> AsyncIterator[tuple[ReplicasClient, list[RuntimeClient]]]:
    """Yields the client of a server's replicas: CPU runtimes of the embedded model in threads, with these pools."""
    checkpoint = resolve("tiny")
    engine = EngineConfig(
        model=ModelConfig(model="tiny", device="cpu"), cache=CacheConfig(max_total_tokens=n_tokens)
    )
    resolved = resolve_config(engine, checkpoint, look_at_machine("cpu"))
    metrics, misses = Metrics(), MissRecord()
    clients = [RuntimeClient(metrics, misses) for _ in range(N_REPLICAS)]
    # It waits for replicas on a busy machine, and no time passes.
    placement = Placement(probe_limit_s=LIMIT_S, clock=lambda: 1.0)
    joint = ReplicasClient(clients, metrics, misses, placement)
    with ExitStack() as stack:
        threads = []
        for index, client in enumerate(clients):
            path = folder / f"{index}.sock"
            socket = stack.enter_context(open_socket(path))
            await client.connect(str(path))
            threads.append(threading.Thread(target=RuntimeServer(socket, open_loop(resolved, checkpoint)).run))
            threads[-1].start()
        try:
            for client in clients:
                await client.handshake()
            yield joint, clients
        finally:
            for client, thread in zip(clients, threads, strict=True):
                client.drain()
                await asyncio.to_thread(thread.join, LIMIT_S)
            await joint.close()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("workload", "parameters", "n_tokens"),
    rest_nightly(
        [
            ("agents", {"num_sessions": 16, "num_turns": 2, "num_shots": 3}, 1200),
            ("multiturn", {"num_sessions": 8, "num_turns": 4}, 1200),
        ],
        kept=(1,),
    ),
)
def test_hits_equal_those_of_a_server_whose_pools_evict(workload, parameters, n_tokens, tmp_path, simulated):
    log = write_log(tmp_path / "log.jsonl", workload, **parameters)
    traffic = read_recording(log, tokenizer="tiny").traffic

    async def served() -> tuple[list[float], int]:
        async with replicas(tmp_path, n_tokens) as (joint, clients):
            for index in range(len(traffic.n_tokens)):
                prompt = Submit(str(index), traffic.symbols(index), SamplingParams(max_tokens=1))
                async with joint.submit([prompt], arrived=Arrival(time.monotonic())) as group:
                    async for _ in group.deltas():
                        pass
            stats = [await client.stats() for client in clients]
            rates = [100 * one.prefix_hits_total / one.prefix_queries_total for one in stats]
            return rates, sum(one.prefix_hits_total for one in stats)

    rates, n_cached = asyncio.run(served())
    flags = ("--trace", log, "--tokenizer", "tiny", "--capacity", n_tokens)
    pooled, replicated, infinite = simulated(*flags, "--replicas", N_REPLICAS)
    assert replicated["server_hit_rates_pct"] == pytest.approx(rates, abs=0.001)
    assert replicated["n_cached_tokens"] == n_cached < infinite["n_cached_tokens"]
    assert replicated["n_evicted_pages"] > 0
    assert [one["capacity_tokens"] for one in (pooled, replicated, infinite)] == [2 * n_tokens, n_tokens, None]


@pytest.mark.nightly
@pytest.mark.parametrize(("concurrency", "output_len"), rest_nightly([(16, 8), (1, 600)], kept=(0,)))
def test_a_replica_gets_what_it_computes_now_and_what_it_has_since_long(
    concurrency, output_len, tmp_path, simulated
):
    """Each of two documents is asked about eight times: all at once, or with long answers one after another."""
    documents = [list(range(first, first + 320)) for first in (1, 1001)]
    prompts = [[*documents[n // 2 % 2], 2000 + n] for n in range(16)]
    log = write_lines(tmp_path / "log.jsonl", *({"prompt_token_ids": prompt} for prompt in prompts))
    pooled, replicated, _ = simulated(
        *("--trace", log, "--capacity", "20k", "--replicas", 2, "--concurrency", concurrency),
        *("--output-len", output_len, "--max-num-batched-tokens", 352),
    )
    assert replicated["n_cached_tokens"] == pooled["n_cached_tokens"] == 14 * 320
    assert replicated["server_hit_rates_pct"] == [pytest.approx(100 * 7 / 8 * 320 / 321, abs=0.001)] * 2
    assert (replicated["servers"], replicated["routing"], replicated["busiest_server"]) == (2, "replicas", 1)


def test_one_server_beside_replicas_has_the_states_of_all(tmp_path, simulated):
    """Twelve documents come back after each other, so that a device with few states finds some of them only."""
    documents = [list(range(first, first + 320)) for first in range(1, 12_000, 1000)]
    prompts = [[*document, 20_000 + n] for n in range(3) for document in documents]
    log = write_lines(tmp_path / "log.jsonl", *({"prompt_token_ids": prompt} for prompt in prompts))
    flags = ("--trace", log, "--concurrency", 2)
    of_both, _ = simulated(*flags, "--capacity", "40k", "--num-states", 16)
    of_one, _ = simulated(*flags, "--capacity", "40k", "--num-states", 8)
    pooled, replicated, _ = simulated(*flags, "--capacity", "20k", "--num-states", 8, "--replicas", 2)
    assert pooled["n_cached_tokens"] == of_both["n_cached_tokens"] > of_one["n_cached_tokens"]
    assert (pooled["n_states"], replicated["n_states"]) == (16, 8)


@pytest.mark.nightly
def test_a_prompt_that_was_evicted_since_goes_by_load(tmp_path, simulated):
    prompts = [list(range(1000 * n, 1000 * n + 320)) for n in (1, 2, 3, 4, 5, 1)]
    log = write_lines(tmp_path / "log.jsonl", *({"prompt_token_ids": prompt} for prompt in prompts))
    flags = ("--trace", log, "--replicas", 2, "--output-len", 600, "--capacity")
    _, evicting, infinite = simulated(*flags, 960)
    assert (evicting["n_cached_tokens"], evicting["busiest_server"]) == (0, 1)
    _, keeping, _ = simulated(*flags, "20k")
    assert keeping["n_cached_tokens"] == infinite["n_cached_tokens"] > 0
    assert keeping["busiest_server"] > 1
