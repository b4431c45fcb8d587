"""The printed table of a simulation in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from radixkv.lab.bench.formatting import format_tokens, plural
from radixkv.lab.simulator.recording import Recording
from radixkv.lab.simulator.result_table import Column, capacity_columns
from radixkv.lab.simulator.server_policies import ServerPolicies
from radixkv.lab.simulator.simulation import Result
from radixkv.lab.simulator.timed_simulation import ArrivalSettings, TimedRow


def timed_columns(asked: ServerPolicies, *, has_host: bool, has_disk: bool, has_policies: bool) -> list[Column]:
    """Returns the columns, from left to right.

    Args:
        asked: the policies that are compared.
        has_host: whether a capacity has a host tier.
        has_disk: whether a capacity has a disk tier.
        has_policies: whether several eviction policies are compared.
    """
    has_admission, has_pauses = asked.admission != "reserved", asked.pauses != "none"
    known: Sequence[tuple[bool, Column]] = (
        (has_admission, Column("admission", _cell(lambda one: one.admission), 9, is_key=True)),
        (has_pauses, Column("pauses", _cell(lambda one: one.pauses), is_key=True)),
        (
            asked.loads_ahead,
            Column("load ahead", _cell(lambda one: "yes" if one.loads_ahead else "no"), 5, is_key=True),
        ),
        (True, Column("hit rate", lambda one: f"{one.hit_rate_pct:.1f}%")),
        (has_host, Column("loaded tokens", lambda one: format_tokens(one.n_loaded_tokens), 7)),
        (has_pauses, Column("on device", _cell(lambda one: _pct(one.returns_on_device_pct)))),
        (True, Column("TTFT p50", _cell(lambda one: _seconds(one.ttft_p50_s)), 7)),
        (True, Column("TTFT p99", _cell(lambda one: _seconds(one.ttft_p99_s)), 7)),
        (has_pauses, Column("returns p50", _cell(lambda one: _seconds(one.return_ttft_p50_s)), 7)),
        (has_pauses, Column("returns p99", _cell(lambda one: _seconds(one.return_ttft_p99_s)), 7)),
        (has_admission, Column("stall p99", _cell(lambda one: _seconds(one.stall_p99_s)), 7)),
        (has_admission, Column("preempted", _cell(lambda one: f"{one.n_preemptions:,}"), 9)),
        (True, Column("tokens /s", _cell(lambda one: format_tokens(round(one.output_tokens_per_s))))),
    )
    keys = capacity_columns(has_host=has_host, has_disk=has_disk, has_policies=has_policies)
    return [*keys, *(column for is_shown, column in known if is_shown)]


def timed_title(arrivals: ArrivalSettings) -> str:
    """Returns how requests arrive, for the line above the table."""
    if arrivals.request_rate is None:
        return "recorded times" + (f", {arrivals.speed:g} times as fast" if arrivals.speed != 1 else "")
    return (
        f"{arrivals.request_rate:g} conversations a second; median pauses {arrivals.tool_median_s:g} s of tools "
        f"and {arrivals.user_median_s:g} s of users"
    )


def timed_remarks(rows: Sequence[TimedRow], recording: Recording) -> list[str]:
    """Returns the remarks below the table: what its times are those of, and which answers are not known."""
    last = rows[-1]
    remarks = [
        f"times are modelled: {last.step_ms:g} ms a step, {last.compute_us_per_token:g} µs for each prompt token. "
        f"{last.n_returns:,} of {plural(last.n_requests, 'request')} go on from an earlier one"
    ]
    if recording.n_unknown_answers:
        remarks.append(
            f"{plural(recording.n_unknown_answers, 'request')} without a known answer: their first token ends them"
        )
    return remarks


def _cell(text: Callable[[TimedRow], str]) -> Callable[[Result], str]:
    def cell(result: Result) -> str:
        assert isinstance(result, TimedRow)
        return text(result)

    return cell


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s" if value < 10 else f"{value:.1f} s"


def _pct(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}%"
