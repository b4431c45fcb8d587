"""What the runtime did between two looks at its counters."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.wire import Stats


@dataclass(frozen=True)
class Interval:
    """Two looks, and the seconds between them."""

    before: Stats
    after: Stats
    seconds: float

    @property
    def has_work(self) -> bool:
        """Whether something ran or waited at either look, or in between."""
        ends = (self.before, self.after)
        return self.before.steps_total != self.after.steps_total or any(
            look.n_running or look.n_waiting for look in ends
        )

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that were not computed; None without prompts."""
        n_tokens = self.after.prefix_queries_total - self.before.prefix_queries_total
        return (self.after.prefix_hits_total - self.before.prefix_hits_total) / n_tokens if n_tokens else None

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens of requests that were prefilled, computed or cached."""
        return (self.after.prompt_tokens_total - self.before.prompt_tokens_total) / self.seconds

    @property
    def generation_tokens_per_s(self) -> float:
        """Tokens generated."""
        return (self.after.generation_tokens_total - self.before.generation_tokens_total) / self.seconds
