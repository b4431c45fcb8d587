"""``StepTime``: how long a step takes, by what its rows compute."""

from __future__ import annotations

from typing import NamedTuple

from radixkv.runtime.step.plan import StepPlan


class StepTime(NamedTuple):
    """The time of a step, linear in what it computes.

    The defaults are those of an 8B model in bfloat16 on an H200 with all that a server does beside it, fitted to
    ``bench/results/gpu_server.jsonl``: few-shot prompts give 9,900 tokens/s there and prompts that share nothing
    2,500, each with one replica.
    """

    fixed_s: float = 0.006
    row_s: float = 20e-6
    """For each row that generates a token."""
    prompt_token_s: float = 27e-6
    read_token_s: float = 0.0
    """For each token that a row which generates a token reads."""

    def seconds(self, n_prompt_tokens: int, n_rows: int, n_read_tokens: int = 0) -> float:
        """Returns the time of a step."""
        return (
            self.fixed_s
            + self.row_s * n_rows
            + self.prompt_token_s * n_prompt_tokens
            + self.read_token_s * n_read_tokens
        )

    def of_plan(self, plan: StepPlan) -> float:
        """Returns the time of a plan, whose rows of one token generate one. O(rows)."""
        n_prompt = n_rows = n_read = 0
        for row in plan.rows:
            if row.n_tokens == 1:
                n_rows += 1
                n_read += row.start + 1
            else:
                n_prompt += row.n_tokens
        return self.seconds(n_prompt, n_rows, n_read)


H200_8B = StepTime(fixed_s=3.96e-3, row_s=8e-6, prompt_token_s=20.7e-6, read_token_s=42e-9)
"""An 8B model in bfloat16 on an H200, the device alone, fitted to ``bench/results/preemption.jsonl``."""
