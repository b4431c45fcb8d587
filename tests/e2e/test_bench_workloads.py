"""Workloads that no other test covers, on a real server with the embedded model."""

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from radixkv.checkpoints.resolve import resolve
from radixkv.lab.bench.report.result_table import outputs_equal
from radixkv.lab.bench.run import Benchmark
from radixkv.lab.bench.workloads.base import Source
from radixkv.lab.bench.workloads.catalog import load_workload
from support.live import LiveServer, serving

pytestmark = pytest.mark.nightly
SIZES = {
    "agents": {"num_sessions": 2, "num_turns": 1, "num_shots": 4},
    "chat": {"num_sessions": 2, "num_turns": 6, "output_len": 16},
    "judge": {"num_documents": 2, "num_questions": 3, "num_facts": 30, "output_len": 24},
    "long-document-qa": {"num_documents": 2, "num_questions": 3, "num_facts": 40, "output_len": 24},
    "rag": {"num_documents": 4, "num_questions": 2, "num_chunks": 3, "num_facts": 12, "output_len": 24},
    "self-consistency": {"num_prompts": 3, "num_samples": 3, "num_shots": 3},
    "trace": {"num_prompts": 8, "block_len": 16, "max_output_len": 4},
    "tree-of-thought": {"num_prompts": 1, "width": 2, "depth": 4, "beam": 2, "num_shots": 3},
}


def bench(name, speed=None, **sizes):
    workload = msgspec.structs.replace(load_workload(name), **SIZES[name] | sizes)
    max_concurrency = 1 if speed else 2  # so that a slow machine does not change how much of a trace is shared
    return Benchmark(
        name, workload, Source(seed=1), max_concurrency=max_concurrency, speed=speed, warmup_requests=0
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(resolve("tiny").folder, tmp_path_factory.mktemp("tiny") / "errors") as live:
        yield live


@pytest.mark.parametrize("name", sorted(SIZES))
def test_a_workload_is_answered_correctly_and_from_the_cache(tiny, name):
    made = bench(name, speed=50.0 if name == "trace" else None)
    outcome = asyncio.run(made.run(tiny.base_url))
    line, report = outcome.metrics, outcome.metrics["cache_report"]
    assert outcome.errors == []
    assert line["completed"] == made.n_requests
    assert line["accounting"]["agree"] is True
    if name != "trace":
        assert line["accuracy_pct"] >= 60
    assert report["cache_hit_rate_pct"] >= 0.8 * report["optimum_pct"], report
    assert report["optimum_pct"] > 20


def test_a_sensitive_model_answers_the_same_with_and_without_the_cache(server, start):
    """An untrained model's answers depend on every page, so a wrong page shows."""
    made = [
        bench("judge", num_documents=1, output_len=8),
        bench("tree-of-thought", depth=3, num_shots=1, output_len=8),
    ]
    on = [asyncio.run(each.run(server.base_url)) for each in made]
    with start("--no-enable-prefix-caching") as live:
        off = [asyncio.run(each.run(live.base_url)) for each in made]
    for one, other in zip(off, on, strict=True):
        assert one.errors == other.errors == []
        assert outputs_equal(one.metrics, other.metrics)
        assert one.metrics["cache_report"]["total_cached_tokens"] == 0
        assert other.metrics["cache_report"]["cache_hit_rate_pct"] > 40
