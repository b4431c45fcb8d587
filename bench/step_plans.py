"""Synthetic step plans as the scheduler would make them, over pages without computed KV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from radixkv.runtime.step.plan import Row, RowSampling, SharedRun, StepPlan
from radixkv.wire.messages import pack_tokens

PAGE_SIZE = 16
MAX_MODEL_LEN = 16_384
MAX_STEPS = 128
"""Maximum number of plans of one case."""
GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, index=0)


@dataclass(frozen=True)
class Case:
    """The rows of a step: decode rows, and chunks of prompts that are the same in each step."""

    name: str
    n_decode: int = 0
    """Number of decode rows."""
    length: int = 0
    """Tokens of each decode row in the first step; one more in each later step."""
    n_drafts: int = 0
    """Drafts of each decode row."""
    n_shared: int = 0
    """Leading tokens that each quarter of the decode rows has in common."""
    n_prompts: int = 0
    """Number of prompt rows."""
    n_new: int = 0
    """Tokens that each prompt row computes."""
    n_cached: int = 0
    """Cached tokens before those of each prompt row."""

    @property
    def n_tokens(self) -> int:
        """Tokens that one step computes."""
        return self.n_decode * (1 + self.n_drafts) + self.n_prompts * self.n_new


CASES = (
    Case("decode 1x192", 1, 192),
    Case("decode 1x2048", 1, 2048),
    Case("decode 16x512", 16, 512),
    Case("decode 64x1024", 64, 1024),
    Case("decode 256x320", 256, 320),
    Case("decode 256x1650", 256, 1650),
    Case("decode 256x1650 shared", 256, 1650, n_shared=1536),
    Case("decode 512x1024", 512, 1024),
    Case("decode 512x1650 shared", 512, 1650, n_shared=1536),
    Case("drafts 1x1024+4", 1, 1024, n_drafts=4),
    Case("drafts 1x4096+4", 1, 4096, n_drafts=4),
    Case("drafts 8x1024+4", 8, 1024, n_drafts=4),
    Case("drafts 8x4096", 8, 4096),
    Case("drafts 8x4096+4", 8, 4096, n_drafts=4),
    Case("drafts 8x4096+8", 8, 4096, n_drafts=8),
    Case("drafts 32x1024+4", 32, 1024, n_drafts=4),
    Case("prompts 1x64", n_prompts=1, n_new=64),
    Case("prompts 1x256", n_prompts=1, n_new=256),
    Case("prompts 4x128", n_prompts=4, n_new=128),
    Case("extend 1x64+1536", n_prompts=1, n_new=64, n_cached=1536),
    Case("mixed 7x4096 1x40", 7, 4096, n_prompts=1, n_new=40),
    Case("mixed 7x4096 1x248", 7, 4096, n_prompts=1, n_new=248),
    Case("mixed 28x2048 4x40", 28, 2048, n_prompts=4, n_new=40),
    Case("mixed 16x512 1x64", 16, 512, n_prompts=1, n_new=64),
    Case("mixed 128x1024 2x96", 128, 1024, n_prompts=2, n_new=96),
    Case("mixed 256x1024 2x96", 256, 1024, n_prompts=2, n_new=96),
    Case("prompts 8x1024", n_prompts=8, n_new=1024),
    Case("extend 64x128+1536", n_prompts=64, n_new=128, n_cached=1536),
    Case("mixed 256x1024 8x960", 256, 1024, n_prompts=8, n_new=960),
)
SMALL_CASES = (
    Case("decode 4x40", 4, 40),
    Case("decode 4x80 shared", 4, 80, n_shared=48),
    Case("drafts 2x80+3", 2, 80, n_drafts=3),
    Case("prompts 2x32", n_prompts=2, n_new=32),
    Case("mixed 4x40 2x24", 4, 40, n_prompts=2, n_new=24),
)


class Plans:
    """Iterates over the step plans of a case.

    Args:
        case: the rows of each step.
        n_pages: pages of the pool.
        first_step: number of the first plan.

    Raises:
        SystemExit: the pool is too small.
    """

    def __init__(self, case: Case, n_pages: int, first_step: int) -> None:
        self._case = case
        self._step = self._first_step = first_step
        self._rng = Random(first_step)
        self._free = iter(range(n_pages))
        self._n_pages = n_pages
        n_groups = min(4, case.n_decode)
        shared = [self._pages(case.n_shared) for _ in range(n_groups)]
        self._tables = [
            (
                *shared[row * n_groups // case.n_decode],
                *self._pages(case.length + case.n_drafts + MAX_STEPS - case.n_shared),
            )
            for row in range(case.n_decode)
        ]
        self._tables += [self._pages(case.n_cached + case.n_new) for _ in range(case.n_prompts)]
        groups = [
            [row for row in range(case.n_decode) if row * n_groups // case.n_decode == group]
            for group in range(n_groups)
        ]
        self._runs = tuple(
            SharedRun(tuple(rows), 0, case.n_shared // PAGE_SIZE)
            for rows in groups
            if len(rows) > 1 and case.n_shared >= PAGE_SIZE
        )
        self._n_done = 0

    def __iter__(self) -> Iterator[StepPlan]:
        return self

    def __next__(self) -> StepPlan:
        """Returns the next plan: decode rows grow by a token, prompt rows keep their size."""
        case, is_first = self._case, self._n_done == 0
        rows = [
            Row(
                batch_slot=batch_slot,
                start=(start := case.length - 1 + self._n_done),
                n_tokens=1 + case.n_drafts,
                tokens=self._ids(1 + case.n_drafts) if is_first or case.n_drafts else None,
                write_start=start,
                table_start=0,
                table_pages=table if is_first else (),
                sampling=GREEDY,
                n_drafts=case.n_drafts,
            )
            for batch_slot, table in enumerate(self._tables[: case.n_decode])
        ]
        rows += [
            Row(
                batch_slot=batch_slot,
                start=case.n_cached,
                n_tokens=case.n_new,
                tokens=self._ids(case.n_new),
                write_start=case.n_cached,
                table_start=0,
                table_pages=table,
                sampling=GREEDY,
            )
            for batch_slot, table in enumerate(self._tables[case.n_decode :], case.n_decode)
        ]
        plan = StepPlan(
            self._step,
            tuple(rows),
            shared_runs=self._runs,
            runs_id=self._first_step,
            n_decode=case.n_decode,
            n_drafts=case.n_decode * case.n_drafts,
        )
        self._step += 1
        self._n_done += 1
        return plan

    def _pages(self, n_tokens: int) -> tuple[int, ...]:
        n_needed = -(-n_tokens // PAGE_SIZE)
        pages = tuple(page for page, _ in zip(self._free, range(n_needed), strict=False))
        if len(pages) < n_needed:
            raise SystemExit(f"the pool's {self._n_pages} pages are too few for {self._case.name}; leave it out")
        return pages

    def _ids(self, n: int) -> bytes:
        return pack_tokens([self._rng.randrange(10, 32_000) for _ in range(n)])
