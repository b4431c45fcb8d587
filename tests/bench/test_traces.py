"""Classification of the kernels of a synthetic trace."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from support.paths import ROOT


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    monkeypatch.delitem(sys.modules, "traces", raising=False)
    import traces

    return traces


def event(name: str, begin: float, duration: float, kind: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": duration}


EVENTS = [
    event("nvjet_tst_128x256_64x4", 100.0, 50.0),
    event("cudaLaunchKernel", 0.0, 400.0, "cuda_runtime"),
    event("void flashinfer::BatchPrefillWithPagedKVCacheKernel<false, 16u>(Params)", 150.0, 30.0),
    event("_add_rms_norm", 200.0, 10.0),
    event("nvjet_tst_128x256_64x4", 205.0, 45.0),  # starts before the norm ends
    event("Memcpy HtoD (Pinned -> Device)", 350.0, 2.0, "gpu_memcpy"),
]


def test_the_report_divides_the_span_into_kinds_and_gaps(traces: ModuleType) -> None:
    report = traces.Trace(traces.spans_of(reversed(EVENTS))).report(n_steps=2)
    assert report["span_ms"] == 0.252
    assert {kind: each["us_per_step"] for kind, each in report["kinds"].items()} == {
        "gaps": 60.0,
        "GEMM": 45.0,
        "attention": 15.0,
        "norm": 5.0,
        "copies": 1.0,
    }
    assert report["idle_pct"] == pytest.approx(100 * 120 / 252, abs=0.01)
    assert report["gaps"] == {"<50us": {"n": 1, "us": 20.0}, "<200us": {"n": 1, "us": 100.0}}
    longest, other = report["longest_gaps"]
    assert longest == {"us": 100.0, "at_ms": 0.15, "after": "nvjet_tst_128x256_64x4", "before": "Memcpy HtoD"}
    assert (other["us"], other["before"]) == (20.0, "_add_rms_norm")
    first = report["kernels"][0]
    assert (first["name"], first["calls_per_step"], first["us_per_call"]) == ("nvjet_tst_128x256_64x4", 1.0, 45.0)
    assert "BatchPrefillWithPagedKVCacheKernel" in traces.table(report)


@pytest.mark.parametrize(
    ("name", "kind", "short_name"),
    [
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>(Params)", "GEMM", "Kernel2 cutlass_80"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ArgMaxOps>>", "sampling", "reduce"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>(int)", "copies", "Fill"),
        ("_rotate_and_store", "rotary+store", "_rotate"),
        ("_silu_and_multiply", "activation", "_silu"),
        ("void flashinfer::MergeStateInPlaceKernel<8u>(float*)", "attention", "MergeState"),
        ("_prepare_token_inputs", "fields", "_prepare_token"),
        ("_attend_decode", "attention", "_attend_decode"),
        ("_multiply_thin", "GEMM", "_multiply_thin"),
        ("something_new", "other", "something_new"),
    ],
)
def test_kernels_are_classified_by_their_names(traces: ModuleType, name: str, kind: str, short_name: str) -> None:
    assert traces.kind_of(name) == kind
    assert short_name in traces.short_name(name)


def test_an_empty_trace_has_a_report(traces: ModuleType) -> None:
    assert traces.Trace([]).report()["idle_pct"] == 0.0
