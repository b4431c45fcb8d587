"""The runtime's work between two readings of its counters."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.wire.stats import Stats


@dataclass(frozen=True)
class StatsDelta:
    """Two readings of the runtime's counters, and the seconds between them."""

    before: Stats
    after: Stats
    seconds: float

    @property
    def has_work(self) -> bool:
        """Whether a request ran or waited at either reading, or a step ran in between."""
        readings = (self.before, self.after)
        return self.before.steps_total != self.after.steps_total or any(
            stats.n_running or stats.n_waiting for stats in readings
        )

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens found in the cache; None without prompts."""
        n_tokens = self.after.prefix_queries_total - self.before.prefix_queries_total
        return (self.after.cache_use.n_cached - self.before.cache_use.n_cached) / n_tokens if n_tokens else None

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens, computed or cached, of prefilled requests."""
        return (self.after.prompt_tokens_total - self.before.prompt_tokens_total) / self.seconds

    @property
    def generation_tokens_per_s(self) -> float:
        """Generated tokens."""
        return (self.after.generation_tokens_total - self.before.generation_tokens_total) / self.seconds
