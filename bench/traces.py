"""GPU time by kernel, from traces of torch's profiler."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = (
    ("attention", r"attend|prefill|decode|attention|merge|cascade|flash::|fmha|_gather_queries|_copy_item_queries"),
    ("GEMM", r"gemm|nvjet|cutlass|xmma|cublas|splitk|gemv|_multiply_"),
    ("norm", r"norm"),
    ("rotary+store", r"rotat|rotary|rope"),
    ("activation", r"silu|swiglu|activation"),
    ("sampling", r"argmax|best_of|sampl|softmax|top_?k|penal|_draw|_edit_|_list_largest|_group_maxima|_weigh"),
    ("fields", r"update_tables|prepare_token_inputs|_stamp"),
    ("copies", r"memcpy|memset|copy|fill"),
)
"""Kinds of kernels with a pattern of their names; the first match applies."""

N_LONGEST = 8
"""Number of gaps that are reported one by one."""
GAPS_US = (2.0, 10.0, 50.0, 200.0)
"""Upper bounds of the histogram of gaps."""


@dataclass(frozen=True)
class Span:
    """One kernel or copy on the GPU; microseconds."""

    name: str
    begin: float
    end: float


class Gap(NamedTuple):
    """A time in which nothing ran on the GPU."""

    us: float
    at_ms: float
    """Start of the gap, since the start of the trace."""
    after: str
    """Name of the kernel before the gap."""
    before: str
    """Name of the kernel after the gap."""


@dataclass(frozen=True)
class Trace:
    """Kernels and copies in the order of their starts."""

    spans: Sequence[Span]

    @property
    def span_us(self) -> float:
        """Time from the first start to the last end."""
        return max(span.end for span in self.spans) - self.spans[0].begin if self.spans else 0.0

    @property
    def gaps(self) -> list[Gap]:
        """The gaps of the trace, in order."""
        gaps: list[Gap] = []
        last = self.spans[0] if self.spans else None
        for span in self.spans:
            assert last is not None
            if span.begin > last.end:
                at_ms = (last.end - self.spans[0].begin) / 1e3
                gaps.append(
                    Gap(span.begin - last.end, round(at_ms, 3), short_name(last.name), short_name(span.name))
                )
            last = max(last, span, key=lambda one: one.end)
        return gaps

    @property
    def own_us(self) -> list[float]:
        """Time of each kernel without its overlap with earlier ones; some kernels start early and wait.

        Together with the gaps these times add up to the whole span.
        """
        times: list[float] = []
        end = self.spans[0].begin if self.spans else 0.0
        for span in self.spans:
            times.append(max(0.0, span.end - max(span.begin, end)))
            end = max(end, span.end)
        return times

    def report(self, n_steps: int = 1, n_names: int = 25) -> dict[str, Any]:
        """Returns microseconds per step by kind and by kernel, with their shares of the span, and the gaps."""
        span_us = self.span_us or 1.0
        by_name: defaultdict[str, list[float]] = defaultdict(list)
        by_kind: defaultdict[str, float] = defaultdict(float)
        kinds: dict[str, str] = {}
        for span, time in zip(self.spans, self.own_us, strict=True):
            name = short_name(span.name)
            by_name[name].append(time)
            kinds[name] = kind_of(span.name)
            by_kind[kinds[name]] += time
        gaps = self.gaps
        by_kind["gaps"] = sum(gap.us for gap in gaps)
        names = sorted(by_name, key=lambda name: -sum(by_name[name]))[:n_names]
        return {
            "steps": n_steps,
            "span_ms": round(span_us / 1e3, 3),
            "idle_pct": round(100 * by_kind["gaps"] / span_us, 2),
            "gaps": _histogram(gap.us for gap in gaps),
            "longest_gaps": [gap._asdict() for gap in sorted(gaps, reverse=True)[:N_LONGEST]],
            "kinds": {
                kind: {"us_per_step": round(time / n_steps, 1), "pct": round(100 * time / span_us, 2)}
                for kind, time in sorted(by_kind.items(), key=lambda pair: -pair[1])
            },
            "kernels": [
                {
                    "name": name,
                    "kind": kinds[name],
                    "calls_per_step": round(len(by_name[name]) / n_steps, 2),
                    "us_per_call": round(sum(by_name[name]) / len(by_name[name]), 2),
                    "us_per_step": round(sum(by_name[name]) / n_steps, 1),
                    "pct": round(100 * sum(by_name[name]) / span_us, 2),
                }
                for name in names
            ],
        }


def record_trace(work: Callable[[], object]) -> Trace:
    """Runs ``work`` and returns the trace of the GPU. ``work`` must not leave anything running."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            work()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return Trace(spans_of(events))


def spans_of(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Returns the kernels and copies of a Chrome trace, by start."""
    spans = [
        Span(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(spans, key=lambda span: span.begin)


def kind_of(name: str) -> str:
    """Returns the kind of a kernel from its whole name."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def short_name(name: str) -> str:
    """Returns a short name of a kernel: without types and arguments, but with the functor that distinguishes it."""
    head, *rest = re.split(r"[<(]", name.removeprefix("void "), maxsplit=1)
    functor = re.search(r"\w+Functor|\w+Ops\b|cutlass_\w+|\w+_kernel_cuda", rest[0]) if rest else None
    return (head.split("::")[-1] + (f" {functor[0]}" if functor else ""))[:80].strip()


def table(report: dict[str, Any], n_names: int = 12) -> str:
    """Returns a report as text: the kinds, then the kernels with the most time."""
    lines = [f"  span {report['span_ms']} ms over {report['steps']} steps, idle {report['idle_pct']}%"]
    lines += [
        f"  {kind:<14} {each['us_per_step']:>10.1f} us {each['pct']:>6.2f}%"
        for kind, each in report["kinds"].items()
    ]
    lines += [
        f"    {each['name'][:52]:<52} {each['calls_per_step']:>7} x {each['us_per_call']:>9.2f} us "
        f"{each['pct']:>6.2f}%"
        for each in report["kernels"][:n_names]
    ]
    lines.append(f"  gaps: {report['gaps']}")
    lines += [
        f"    {gap['us']:.1f} us at {gap['at_ms']:.3f} ms, after {gap['after'][:40]}, before {gap['before'][:40]}"
        for gap in report["longest_gaps"][:4]
    ]
    return "\n".join(lines)


def _histogram(gaps_us: Iterable[float]) -> dict[str, dict[str, float]]:
    """Returns number and total length of gaps by length."""
    bins: dict[str, list[float]] = {name: [] for name in (*(f"<{limit:g}us" for limit in GAPS_US), "longer")}
    for gap in gaps_us:
        bins[next((f"<{limit:g}us" for limit in GAPS_US if gap < limit), "longer")].append(gap)
    return {name: {"n": len(gaps), "us": round(sum(gaps), 1)} for name, gaps in bins.items() if gaps}
