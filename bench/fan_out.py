"""Prompt tokens that are computed more than once where many agents begin with one new prefix.

Time is virtual: scheduler and cache are the server's, and steps take the times of ``StepTime``. Each
step is planned before the result of the one before is known, as in the server. Prints a JSON line for each kind
of model, case, policy and step size: tokens computed beyond the distinct ones, in all and in percent of these,
and the mean and last time to the first token. Distinct tokens are those of the tree of all prompts, each counted
once.

    burst           64 children at once: a prefix of 20,000 tokens, tails of 50 to 200
    in_page         the same with 20,007 tokens, so that the prefix ends within a page
    messages        the same, and the prefix ends a message
    mixed           the same, in a random order among 64 other prompts of 500 to 8,000 tokens
    lengths         tails of 10 to 20,000 tokens
    levels          8 groups of 8 children, with 2,000 tokens more in common
    trickle         one child after each step
    parent          a prompt of the prefix and 30,000 tokens; after one step its children
    parent_last     the children, and after one step the parent
    tenants         four tenants with 16 children each, which share nothing between tenants
    choices         16 children with four choices each
    first_aborted   burst, whose first prompt is aborted after a step
    small_pool      burst in a pool of 40,000 tokens

    python bench/fan_out.py --output-file bench/results/fan_out.jsonl
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from random import Random
from typing import Any, NamedTuple

from result_lines import report, script_parser

from radixkv.lab.bench.environment import provenance
from radixkv.lab.simulator.step_time import StepTime
from radixkv.runtime.assemble import open_scheduler, page_quotas
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.scheduler import SchedulerLimits
from radixkv.runtime.states.recurrent_states import RecurrentStates
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.settings.config import SchedulePolicy
from radixkv.settings.tenants import OPERATOR, TenantConfig
from radixkv.tree.node import Namespace

PAGE_SIZE = 16
VOCAB = 32_000
MESSAGE_END = 2
"""An id that no prompt has otherwise."""
PREFIX_TOKENS = 20_000
N_CHILDREN = 64
N_OUTPUT = 8
N_STATES = 256
"""Enough: how many are needed is another question."""


class Arrival(NamedTuple):
    """A prompt, and before which step it arrives."""

    prompt: list[int]
    step: int = 0
    tenant: str = OPERATOR
    n_choices: int = 1


@dataclass
class Case:
    """What arrives."""

    arrivals: list[Arrival]
    pool_tokens: int = 2_000_000
    tenants: list[str] = field(default_factory=list)
    aborts_first: bool = False
    """Whether the first arrival is aborted after a step."""


def ids(rng: Random, n_tokens: int) -> list[int]:
    return rng.choices(range(10, VOCAB), k=n_tokens)


def children(
    rng: Random, prefix: list[int], low: int = 50, high: int = 200, n: int = N_CHILDREN
) -> list[list[int]]:
    return [prefix + ids(rng, rng.randint(low, high)) for _ in range(n)]


def burst(rng: Random) -> Case:
    return Case([Arrival(one) for one in children(rng, ids(rng, PREFIX_TOKENS))])


def in_page(rng: Random) -> Case:
    return Case([Arrival(one) for one in children(rng, ids(rng, PREFIX_TOKENS + 7))])


def messages(rng: Random) -> Case:
    prefix = [*ids(rng, PREFIX_TOKENS - 1), MESSAGE_END]
    return Case([Arrival([*one, MESSAGE_END]) for one in children(rng, prefix)])


def mixed(rng: Random) -> Case:
    prompts = children(rng, ids(rng, PREFIX_TOKENS)) + [ids(rng, rng.randint(500, 8000)) for _ in range(64)]
    rng.shuffle(prompts)
    return Case([Arrival(one) for one in prompts])


def lengths(rng: Random) -> Case:
    return Case([Arrival(one) for one in children(rng, ids(rng, PREFIX_TOKENS), 10, 20_000)])


def levels(rng: Random) -> Case:
    prefix = ids(rng, PREFIX_TOKENS)
    prompts = [one for _ in range(8) for one in children(rng, prefix + ids(rng, 2000), n=8)]
    rng.shuffle(prompts)
    return Case([Arrival(one) for one in prompts])


def trickle(rng: Random) -> Case:
    return Case([Arrival(one, step) for step, one in enumerate(children(rng, ids(rng, PREFIX_TOKENS)))])


def parent(rng: Random) -> Case:
    prefix = ids(rng, PREFIX_TOKENS)
    first = Arrival(prefix + ids(rng, 30_000))
    return Case([first, *(Arrival(one, 1) for one in children(rng, prefix))])


def parent_last(rng: Random) -> Case:
    prefix = ids(rng, PREFIX_TOKENS)
    return Case([*(Arrival(one) for one in children(rng, prefix)), Arrival(prefix + ids(rng, 30_000), 1)])


def tenants(rng: Random) -> Case:
    names = [f"t{number}" for number in range(4)]
    prompts = children(rng, ids(rng, PREFIX_TOKENS))
    arrivals = [Arrival(one, tenant=names[number % 4]) for number, one in enumerate(prompts)]
    return Case(arrivals, tenants=names)


def choices(rng: Random) -> Case:
    return Case([Arrival(one, n_choices=4) for one in children(rng, ids(rng, PREFIX_TOKENS), n=16)])


def first_aborted(rng: Random) -> Case:
    return Case(burst(rng).arrivals, aborts_first=True)


def small_pool(rng: Random) -> Case:
    return Case(burst(rng).arrivals, pool_tokens=40_000)


CASES: dict[str, Callable[[Random], Case]] = {
    one.__name__: one
    for one in (
        burst, in_page, messages, mixed, lengths, levels, trickle, parent, parent_last, tenants, choices,
        first_aborted, small_pool,
    )
}  # fmt: skip


def n_distinct(arrivals: Sequence[Arrival]) -> int:
    """Returns the tokens of the tree of all prompts, one tree for each tenant. O(tokens · log prompts)."""
    ordered = sorted((one.tenant, one.prompt) for one in arrivals)
    n_tokens = len(ordered[0][1])
    for (last_tenant, last), (tenant, prompt) in pairwise(ordered):
        n_common = 0
        if last_tenant == tenant:
            pairs = enumerate(zip(last, prompt, strict=False))
            n_common = next((n for n, (one, other) in pairs if one != other), min(len(last), len(prompt)))
        n_tokens += len(prompt) - n_common
    return n_tokens


def measure(case: Case, *, has_states: bool, policy: SchedulePolicy, step_tokens: int) -> dict[str, Any]:
    """Returns what one case computes."""
    configs = [TenantConfig(name) for name in case.tenants]
    cache = PageCache(
        case.pool_tokens // PAGE_SIZE,
        PAGE_SIZE,
        page_quotas=page_quotas(configs),
        n_states=N_STATES if has_states else None,
    )
    states = RecurrentStates.at_likely_places(cache, frozenset({MESSAGE_END})) if has_states else None
    limits = SchedulerLimits(max_num_seqs=256, max_num_batched_tokens=step_tokens, max_queued_requests=4096)
    scheduler = open_scheduler(cache, limits, tenants=configs, schedule_policy=policy, states=states)
    times, now, n_steps = StepTime(), 0.0, 0
    arrived_at: dict[Request, float] = {}
    ttft: dict[Request, float] = {}
    coming = deque(case.arrivals)
    launched: deque[StepPlan] = deque()
    first: Request | None = None
    n_computed = 0
    while coming or not scheduler.is_idle:
        while coming and coming[0].step <= n_steps:
            arrival = coming.popleft()
            made = [_request(arrival, len(arrived_at), choice) for choice in range(arrival.n_choices)]
            arrived_at[made[0]] = now
            scheduler.add(made[0], made[1:])
            first = first or made[0]
        if case.aborts_first and n_steps == 1 and first is not None:
            scheduler.abort(first)
            del arrived_at[first]
        plan = scheduler.schedule()
        n_steps += 1
        if plan is not None:
            launched.append(plan)
            rows = zip(plan.rows, scheduler.launched_plans[-1].requests, strict=True)
            n_computed += sum(max(0, min(row.start + row.n_tokens, one.n_prompt) - row.start) for row, one in rows)
        if len(launched) < 2 and (plan is not None or not launched):
            continue
        oldest = launched.popleft()
        now += times.seconds(oldest.n_prompt_tokens, len(oldest.rows))
        result = StepResult(tuple(-1 if r.sampling is None else 7 for r in oldest.rows), (True,) * len(oldest.rows))
        for update in scheduler.complete(oldest, result):
            if update.request in arrived_at and update.request not in ttft:
                ttft[update.request] = now - arrived_at[update.request]
    scheduler.check()
    assert len(ttft) == len(arrived_at), "all prompts were computed"
    distinct = n_distinct(case.arrivals)
    return {
        "distinct_tokens": distinct,
        "computed_tokens": n_computed,
        "again_tokens": n_computed - distinct,
        "again_pct": round(100 * (n_computed - distinct) / distinct, 2),
        "mean_ttft_s": round(sum(ttft.values()) / len(ttft), 3),
        "last_ttft_s": round(max(ttft.values()), 3),
        "preemptions": scheduler.n_preemptions,
    }


def _request(arrival: Arrival, number: int, choice: int) -> Request:
    tokens = bytearray() if choice else bytearray(array("i", arrival.prompt).tobytes())
    return Request(
        id=str(number),
        namespace=Namespace(arrival.tenant),
        known_key=tokens,
        n_prompt=len(arrival.prompt),
        max_tokens=N_OUTPUT,
        sender=arrival.tenant,
        choice=choice,
    )


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--case", action="append", choices=list(CASES), help="may occur several times; default: all"
    )
    parser.add_argument("--model", action="append", choices=("attention", "recurrent"), help="default: both")
    parser.add_argument("--policy", action="append", choices=("lpm", "fcfs"), help="default: both")
    parser.add_argument("--step-tokens", type=int, action="append", help="default: 2048 and 8192")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    runs = product(
        arguments.model or ("attention", "recurrent"),
        arguments.case or CASES,
        arguments.policy or ("lpm", "fcfs"),
        arguments.step_tokens or (2048, 8192),
    )
    for model, name, policy, step_tokens in runs:
        case = CASES[name](Random(arguments.seed))
        line = measure(case, has_states=model == "recurrent", policy=policy, step_tokens=step_tokens)
        settings = {"model": model, "case": name, "policy": policy, "step_tokens": step_tokens}
        report(arguments.output_file, {**settings, **line}, {"seed": arguments.seed, **provenance()})


if __name__ == "__main__":
    main()
