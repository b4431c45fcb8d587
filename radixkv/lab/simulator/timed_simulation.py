"""Replays of a recording in virtual time, with what a server learns and without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import msgspec

from radixkv.errors import ConfigError
from radixkv.lab.simulator.arrivals import Arrivals, RecordedArrivals, SyntheticArrivals
from radixkv.lab.simulator.caches import CacheSettings, Capacity, Policy, ReplayResult, ServerTokens
from radixkv.lab.simulator.concurrent_replay import check_concurrent_replay
from radixkv.lab.simulator.server_policies import KNOWS_NOTHING, Admission, PausePolicy, ServerPolicies
from radixkv.lab.simulator.simulation import Result, Simulation
from radixkv.lab.simulator.timed_replay import Seen, Server, TimedReplay, TimedResult, TimedTraffic
from radixkv.lab.simulator.turns import Turn, find_turns
from radixkv.terminal import Progress


class ArrivalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """When requests arrive."""

    speed: float = 1.0
    """How many times as fast recorded times are replayed."""
    request_rate: float | None = None
    """Conversations that begin a second, with random pauses between their turns; None: at the recorded times."""
    tool_median_s: float = 1.0
    """Median of the random times of tools."""
    user_median_s: float = 10.0
    """Median of the random times of users."""


class TimedRow(Result, frozen=True, kw_only=True):
    """The result of one replay in virtual time: a row of the table and a JSON line.

    Latencies are those of requests that were served; a percentile is None where there is none.
    """

    admission: Admission
    pauses: PausePolicy
    loads_ahead: bool
    arrivals: Literal["recorded", "synthetic"]
    speed: float | None
    """None with synthetic arrivals."""
    request_rate: float | None
    """Conversations that begin a second; None with recorded arrivals, as the two medians."""
    tool_median_s: float | None
    user_median_s: float | None
    max_num_seqs: int
    step_ms: float
    read_us_per_token: float
    n_returns: int
    """Requests that go on from an earlier one."""
    return_hit_rate_pct: float
    """Cached prompt tokens of these as a percentage of their prompt tokens."""
    returns_on_device_pct: float | None
    """How many of these found on the device what they share with the earlier prompt when they arrived, but for less
    than a page."""
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    return_ttft_p50_s: float | None
    """The same of requests that go on from an earlier one."""
    return_ttft_p99_s: float | None
    stall_p99_s: float | None
    """99th percentile of the longest time between two tokens of an answer."""
    duration_s: float
    """Virtual time from the first arrival to the end of the last answer."""
    output_tokens_per_s: float
    n_preemptions: int
    n_recomputed_tokens: int
    """Tokens that preempted requests have computed again."""
    n_pages_loaded_ahead: int | None
    """Pages that were loaded before their request's turn, or before it arrived; None without a host tier."""
    n_pages_loaded_ahead_used: int | None


@dataclass(frozen=True)
class TimedSimulation:
    """Replays of a recording at the times of its requests. Yields their results, the infinite capacity last.

    For each capacity and eviction policy there is a replay of a server that learns and foresees nothing, one with
    ``policies``, and where those learn, one that knows the future in place of it.

    Raises:
        ConfigError: there are no answers, the recording has no times and there is no ``request_rate``, there is no
            host tier to load from, or the recording has no pauses to learn. Raised before anything runs.
    """

    simulation: Simulation
    """What is replayed, with which caches; its steps take the tokens of ``server``, and it has one server."""
    policies: ServerPolicies = KNOWS_NOTHING
    """What is compared with a server that knows nothing."""
    arrival_settings: ArrivalSettings = field(default_factory=ArrivalSettings)
    server: Server = field(default_factory=Server)
    """How fast it is."""

    def __post_init__(self) -> None:
        recording = self.simulation.recording
        name = recording.name
        check_concurrent_replay(recording.traffic, self.server.max_num_batched_tokens)
        if self.simulation.answers is None:
            raise ConfigError(f"{name} does not say how long its answers are; give --output-len")
        if self.arrival_settings.request_rate is None and recording.times_s is None:
            raise ConfigError(
                f"{name} does not say when its requests arrived, which needs a timestamp in milliseconds in each "
                "line; add them, or give --request-rate, which draws arrivals and pauses at random"
            )
        for capacity in self.simulation.capacities:
            if self.policies.loads_ahead and capacity.host is None:
                raise ConfigError(
                    f"capacity {capacity.device} has no host tier to load from; leave --load-ahead out"
                )

        if self.policies.pauses != "none" and not any(self._turns):
            raise ConfigError(f"no request of {name} goes on from an earlier one; leave --learn-pauses out")

    @cached_property
    def _turns(self) -> Sequence[Turn | None]:
        assert self.simulation.answers is not None
        return find_turns(self.simulation.recording.traffic, self.simulation.answers.lengths)

    @property
    def compared(self) -> Sequence[ServerPolicies]:
        """The policies of the replays."""
        one = self.policies
        return list(dict.fromkeys((KNOWS_NOTHING, one, one.oracle)))

    def __iter__(self) -> Iterator[TimedRow]:
        recording, answers = self.simulation.recording, self.simulation.answers
        assert answers is not None
        traffic = recording.traffic
        turns = self._turns
        calls = recording.calls or [()] * len(turns)
        timed = TimedTraffic(traffic, answers, turns, calls, self._arrivals(turns, calls))
        infinite = self._row(None, self.simulation.policies[0], KNOWS_NOTHING, None, timed)
        for capacity in self.simulation.capacities:
            for policy in self.simulation.policies:
                for one in self.compared:
                    yield self._row(capacity, policy, one, infinite.n_cached_tokens, timed)
        yield infinite

    def _arrivals(self, turns: Sequence[Turn | None], calls: Sequence[Sequence[str]]) -> Arrivals:
        how, times_s = self.arrival_settings, self.simulation.recording.times_s
        if how.request_rate is None:
            assert times_s is not None
            return RecordedArrivals(turns, times_s, how.speed)
        return SyntheticArrivals(
            turns,
            calls,
            request_rate=how.request_rate,
            tool_median_s=how.tool_median_s,
            user_median_s=how.user_median_s,
        )

    def _row(
        self,
        capacity: Capacity | None,
        policy: Policy,
        policies: ServerPolicies,
        n_cached_tokens_infinite: int | None,
        timed: TimedTraffic,
    ) -> TimedRow:
        results: list[TimedResult] = []

        def replay(settings: CacheSettings) -> tuple[ReplayResult, Sequence[ServerTokens]]:
            activity = f"replaying {self.simulation.recording.name} in virtual time, admission {policies.admission}"
            activity += f", pauses {policies.pauses}"
            with Progress(activity, enabled=self.simulation.show_progress) as progress:
                results.append(TimedReplay(timed, settings, policies, self.server).run(progress))
            return results[0].replay, ()

        counted = msgspec.structs.asdict(
            self.simulation.counted(capacity, policy, n_cached_tokens_infinite, replay)
        )
        how, is_recorded = self.arrival_settings, self.arrival_settings.request_rate is None
        result, n_tokens = results[0], timed.prompts.n_tokens
        seen, returns = result.seen, [one for one in result.seen if one.is_return]
        n_output = sum(timed.answers.lengths[one.prompt] for one in seen)
        n_prompt = sum(n_tokens[one.prompt] for one in returns)
        return TimedRow(
            **{**counted, "concurrency": None, "max_num_batched_tokens": self.server.max_num_batched_tokens},
            admission=policies.admission,
            pauses=policies.pauses,
            loads_ahead=policies.loads_ahead,
            arrivals="recorded" if is_recorded else "synthetic",
            speed=how.speed if is_recorded else None,
            request_rate=how.request_rate,
            tool_median_s=None if is_recorded else how.tool_median_s,
            user_median_s=None if is_recorded else how.user_median_s,
            max_num_seqs=self.server.max_num_seqs,
            step_ms=round(1e3 * self.server.steps.fixed_s, 6),
            read_us_per_token=round(1e6 * self.server.steps.read_token_s, 6),
            n_returns=len(returns),
            return_hit_rate_pct=round(100 * sum(one.n_cached for one in returns) / n_prompt, 3)
            if n_prompt
            else 0.0,
            returns_on_device_pct=_on_device_pct(returns),
            ttft_p50_s=percentile([one.ttft_s for one in seen], 50),
            ttft_p99_s=percentile([one.ttft_s for one in seen], 99),
            return_ttft_p50_s=percentile([one.ttft_s for one in returns], 50),
            return_ttft_p99_s=percentile([one.ttft_s for one in returns], 99),
            stall_p99_s=percentile([one.stall_s for one in seen], 99),
            duration_s=round(result.seconds, 3),
            output_tokens_per_s=round(n_output / result.seconds, 1) if result.seconds else 0.0,
            n_preemptions=result.counts.n_preemptions,
            n_recomputed_tokens=result.counts.n_recomputed_tokens,
            n_pages_loaded_ahead=result.counts.n_pages_loaded_ahead,
            n_pages_loaded_ahead_used=result.counts.n_pages_loaded_ahead_used,
        )


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Returns the value below which so many percent of the values are; None of none. O(n log n)."""
    return round(sorted(values)[len(values) * percent // 100], 4) if values else None


def _on_device_pct(returns: Sequence[Seen]) -> float | None:
    return round(100 * sum(one.was_on_device for one in returns) / len(returns), 2) if returns else None
