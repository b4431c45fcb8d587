"""Many prompts with one new prefix: each of its tokens is computed once, whatever the order of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.runtime.request import Phase, Request
from radixkv.settings.tenants import TenantConfig
from radixkv.tree.node import Namespace
from support.cases import examples, rest_nightly
from support.engine import Engine

PAGE = 4
BLOCK = 8
"""Positions of states are multiples of it, and no prompt waits for less than two."""
STEM, GROUP = 150, 60
MODELS: dict[str, dict[str, Any]] = {
    "attention": {},
    "recurrent": {"n_states": 200, "state_block_tokens": BLOCK},
    "windows": {"mixed_window": 9},
}


class Arrival(NamedTuple):
    """A prompt, and when it comes and goes."""

    prompt: list[int]
    step: int = 0
    aborted_at: int | None = None
    n: int = 1


class FanOut(Engine):
    """An engine with a large pool; each request has one token of output."""

    def __init__(self, model: str = "attention", *, budget: int = 64, **settings: Any) -> None:
        super().__init__(4000, PAGE, max_num_seqs=64, max_num_batched_tokens=budget, **MODELS[model], **settings)
        self.n_steps = 0

    def check_invariants(self) -> None:
        self.device.free_pages = set(self.free_pages)

    def run_arrivals(self, arrivals: Sequence[Arrival], **options: Any) -> list[Request]:
        """Runs all requests, with a step launched before the result of the one before is taken."""
        requests: dict[int, Request] = {}
        self.n_steps = 0
        while len(requests) < len(arrivals) or not self.scheduler.is_idle:
            for number, one in enumerate(arrivals):
                if number not in requests and one.step <= self.n_steps:
                    requests[number] = self.add(one.prompt, 1, n=one.n, **options)
                is_running = number in requests and requests[number].phase is not Phase.FINISHED
                if is_running and one.aborted_at == self.n_steps:
                    self.abort(requests[number])
            plan = self.launch()
            if len(self.pending) > 1 or (plan is None and self.pending):
                self.collect()
            self.n_steps += 1
            assert self.n_steps < 2000, "some request starves"
        self.check_outputs()
        self.check_idle()
        return [requests[number] for number in range(len(arrivals))]

    @property
    def n_computed(self) -> int:
        return sum(n_tokens for _, _, n_tokens in self.device.computed)


def text(n_tokens: int, *name: int) -> list[int]:
    """Returns tokens of which the first ones differ for each name."""
    return [*(10 + one for one in name), *(10 + (sum(name) * 31 + n * 7) % 80 for n in range(n_tokens - len(name)))]


def child(number: int, n_tail: int, *, n_stem: int = STEM) -> list[int]:
    return text(n_stem, 1) + text(n_tail, number, 2)


def n_distinct(prompts: Sequence[Sequence[int]]) -> int:
    return len({tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)})


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
@pytest.mark.parametrize("budget", [32, 100, 500])
def test_children_that_come_at_once_compute_their_prefix_once(model: str, policy: str, budget: int) -> None:
    """The stem ends at a multiple of pages and blocks, so that nothing at all is computed twice."""
    engine = FanOut(model, budget=budget, schedule_policy=policy)
    prompts = [child(number, 5, n_stem=152) for number in range(16)]
    engine.run_arrivals([Arrival(prompt) for prompt in prompts])
    assert engine.n_computed == n_distinct(prompts)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("budget", [32, 100])
@pytest.mark.parametrize("parent_at", [0, 1])
def test_children_share_what_their_parent_is_still_computing(model: str, budget: int, parent_at: int) -> None:
    engine = FanOut(model, budget=budget)
    parent = Arrival(text(152, 1) + text(400, 77), parent_at)
    children = [Arrival(child(number, 5, n_stem=152), 1 - parent_at) for number in range(8)]
    arrivals = sorted([parent, *children], key=lambda one: one.step)
    engine.run_arrivals(arrivals)
    assert engine.n_computed <= n_distinct([one.prompt for one in arrivals]) + BLOCK


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", rest_nightly(["lpm", "fcfs"], kept=(0,)))
@pytest.mark.parametrize(
    ("n_stem", "n_rest", "budget", "arrive_at", "n_children"),
    rest_nightly([(152, 1200, 100, 3, 16), (152, 1200, 100, 6, 16), (152, 1200, 100, 8, 32)], kept=(2,)),
)
def test_children_that_come_after_their_parent_has_passed_the_stem_compute_it_once_more(
    n_stem: int, n_rest: int, budget: int, arrive_at: int, n_children: int, policy: str, model: str
) -> None:
    """The parent has kept no state there, and one child is on its way while others see both."""
    engine = FanOut(model, budget=budget, schedule_policy=policy)
    parent = Arrival(text(n_stem, 1) + text(n_rest, 77))
    children = [Arrival(child(number, 5, n_stem=n_stem), arrive_at) for number in range(n_children)]
    engine.run_arrivals([parent, *children])
    n_again = 0 if model == "attention" else n_stem
    assert engine.n_computed <= n_distinct([parent.prompt, *(one.prompt for one in children)]) + n_again


@pytest.mark.parametrize("model", MODELS)
def test_each_level_of_a_tree_is_computed_once(model: str) -> None:
    engine = FanOut(model, budget=100)
    prompts = [text(152, 1) + text(64, group, 2) + text(9, number, 3) for group in range(4) for number in range(4)]
    engine.run_arrivals([Arrival(prompts[number * 5 % 16]) for number in range(16)])
    assert engine.n_computed == n_distinct(prompts)


@pytest.mark.parametrize("model", MODELS)
def test_the_others_go_on_when_the_first_one_is_aborted(model: str) -> None:
    """What the first one has computed is not lost where no states are needed."""
    engine = FanOut(model, budget=32)
    prompts = [child(number, 5, n_stem=152) for number in range(8)]
    first = Arrival(prompts[0], aborted_at=2)
    engine.run_arrivals([first, *(Arrival(prompt) for prompt in prompts[1:])])
    n_lost = 0 if model == "attention" else 64
    assert engine.n_computed <= n_distinct(prompts) + n_lost


@pytest.mark.parametrize("order", ["ACB", "ABC", "CAB", "BAC"])
@pytest.mark.parametrize("budget", [32, 500])
def test_a_prompt_that_is_the_common_prefix_of_others_goes_on_from_it(order: str, budget: int) -> None:
    """The prefix ends at a multiple of blocks, so this prompt, which computes a token, needs a block less."""
    prompts = {"A": child(1, 9, n_stem=152), "B": text(152, 1), "C": child(2, 9, n_stem=152)}
    engine = FanOut("recurrent", budget=budget)
    engine.run_arrivals([Arrival(prompts[name]) for name in order])
    assert engine.n_computed <= n_distinct(list(prompts.values())) + 2 * BLOCK


@pytest.mark.parametrize("budget", [32, 100])
def test_prompts_that_leave_one_at_many_places_go_on_from_each(budget: int) -> None:
    longest = text(800, 1)
    prompts = [longest, *(longest[: 16 * n] + text(5, n, 2) for n in range(1, 41))]
    engine = FanOut("recurrent", budget=budget)
    engine.run_arrivals([Arrival(prompt) for prompt in prompts])
    assert engine.n_computed <= 1.2 * n_distinct(prompts)


@pytest.mark.parametrize("times_out", [False, True])
def test_prompts_that_end_while_they_wait_leave_nothing_behind(times_out: bool) -> None:
    """No state is kept where they would have left another prompt."""
    engine = FanOut("recurrent", queue_timeout_s=1.0 if times_out else None)
    waiting = [engine.add(text(40 * n, 1) + text(5, n, 2), 1) for n in range(1, 7)]
    if times_out:
        engine.now += 2.0
        assert len(engine.scheduler.expire()) == len(waiting)
    else:
        for request in waiting:
            engine.scheduler.abort(request)
    engine.run_arrivals([Arrival(text(300, 1))])
    alone = FanOut("recurrent")
    alone.run_arrivals([Arrival(text(300, 1))])
    assert engine.cache.recurrent_states.n_free == alone.cache.recurrent_states.n_free


def test_tenants_share_nothing_and_each_computes_the_prefix_once() -> None:
    engine = FanOut("recurrent", tenants=[TenantConfig("a"), TenantConfig("b")])
    prompts = [child(number, 5, n_stem=152) for number in range(6)]
    for tenant in ("a", "b"):
        for prompt in prompts:
            engine.add(prompt, 1, tenant=tenant, namespace=Namespace(tenant))
    engine.run_arrivals([])
    assert engine.n_computed == 2 * n_distinct(prompts)


def test_choices_wait_with_their_leader() -> None:
    engine = FanOut("recurrent", budget=32)
    prompts = [child(number, 5, n_stem=152) for number in range(4)]
    engine.run_arrivals([Arrival(prompt, n=3) for prompt in prompts])
    n_forks = 2 * len(prompts)
    assert engine.n_computed <= n_distinct(prompts) + n_forks * (BLOCK + 1)


def test_a_prompt_does_not_wait_for_one_that_is_computed_alone() -> None:
    """A step of the first one fails, so that it is retried alone. The others go on meanwhile."""
    engine = FanOut("recurrent", budget=32)
    first = engine.add(child(0, 5), 1)
    engine.failing_ids.add(first.id)
    arrivals = [Arrival(child(number, 5)) for number in range(1, 5)]
    others = engine.run_arrivals(arrivals)
    assert all(one.n_outputs == 1 for one in others)
    assert not first.n_outputs


PROMPTS = st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(1, 90))
"""Which stem and which group a prompt begins with, and how many tokens follow."""
TIMES = st.tuples(st.integers(0, 8), st.none() | st.integers(0, 12))
"""When a prompt arrives, and after how many steps it is aborted."""
SETTINGS = st.tuples(st.sampled_from([16, 40, 150]), st.sampled_from(["lpm", "fcfs"]))
"""Budget and policy."""


def make_prompt(number: int, stem: int, group: int, n_tail: int) -> list[int]:
    return text(STEM, stem) + text(GROUP, group, 1) + text(n_tail + 2, number, 2)


@pytest.mark.parametrize("model", MODELS)
@given(drawn=st.lists(PROMPTS, min_size=2, max_size=8), settings=SETTINGS)
@examples(100)
def test_random_trees_that_arrive_at_once_are_computed_once(
    model: str, drawn: list[tuple[int, int, int]], settings: tuple[int, str]
) -> None:
    """Beside the tree of all prompts, each prompt computes again a part of a page, or of three blocks."""
    engine = FanOut(model, budget=settings[0], schedule_policy=settings[1])
    prompts = [make_prompt(number, *one) for number, one in enumerate(drawn)]
    engine.run_arrivals([Arrival(prompt) for prompt in prompts])
    n_each = PAGE if model == "attention" else 3 * BLOCK
    assert engine.n_computed <= n_distinct(prompts) + n_each * len(prompts)


@pytest.mark.parametrize("model", MODELS)
@given(drawn=st.lists(st.tuples(PROMPTS, TIMES), min_size=2, max_size=8), settings=SETTINGS)
@examples(100)
def test_no_request_is_lost_or_starves_whatever_comes_and_goes(
    model: str, drawn: list[tuple[tuple[int, int, int], tuple[int, int | None]]], settings: tuple[int, str]
) -> None:
    """With attention alone, not even an abort makes anything be computed twice. A state that nobody has kept, since
    nobody waited for it when a prompt came to its place, is computed by the next prompt."""
    engine = FanOut(model, budget=settings[0], schedule_policy=settings[1])
    arrivals = [
        Arrival(make_prompt(number, *one), step, None if after is None else step + after)
        for number, (one, (step, after)) in enumerate(drawn)
    ]
    requests = engine.run_arrivals(arrivals)
    for one, request in zip(arrivals, requests, strict=True):
        assert request.n_outputs == 1 or one.aborted_at is not None
    if model == "attention":
        assert engine.n_computed <= n_distinct([one.prompt for one in arrivals]) + PAGE * len(arrivals)


def test_who_waits_is_not_looked_up_in_the_tree_again_while_nothing_changes() -> None:
    """A long prompt takes 31 steps to the place where 60 others leave it. They could overtake it all that time."""
    engine = FanOut("recurrent", budget=64)
    states = engine.cache.recurrent_states
    assert states is not None
    n_look_ups = 0
    n_found = states.n_found

    def counted(namespace: Namespace, tokens: bytes) -> int:
        nonlocal n_look_ups
        n_look_ups += 1
        return n_found(namespace, tokens)

    states.n_found = counted  # type: ignore[method-assign]
    longest = text(2000, 1) + text(6000, 77)
    others = [child(number, 5, n_stem=2000) for number in range(60)]
    engine.run_arrivals([Arrival(prompt) for prompt in (longest, *others)])
    assert 60 <= n_look_ups <= 4 * 60


@pytest.mark.parametrize("model", ["recurrent", "windows"])
def test_a_prompt_that_goes_back_from_loading_to_the_queue_still_shows_its_prefix(model: str) -> None:
    """A step that computes another prompt has room for two tokens, so that the loaded one gets no row in it."""
    engine = FanOut(model, budget=32, n_slots=400, finishes_copies=False)
    engine.add([*text(152, 1)[:64], 5, 6], 1)
    engine.run_arrivals([])
    engine.store_all()
    engine.cache.invalidate(Namespace(), b"")
    n_before = engine.n_computed
    loaded, other, longer = child(0, 5, n_stem=152), text(62, 2), text(152, 1) + text(400, 77)
    first = engine.add(loaded, 1)
    assert engine.launch() is None
    engine.add(other, 1)
    engine.step()
    assert first.phase is Phase.LOADING
    engine.finish_copies()
    engine.add(longer, 1, priority=-1)
    engine.step()
    assert first.phase is Phase.WAITING
    engine.run_arrivals([])
    assert first.n_outputs == 1
    n_new = n_distinct([loaded, other, longer]) - 64
    assert engine.n_computed - n_before <= n_new + BLOCK


def test_a_choice_that_leads_because_the_first_was_aborted_shows_its_prefix() -> None:
    engine = FanOut("recurrent", budget=32)
    prompts = [child(0, 5, n_stem=152), text(152, 1) + text(400, 77)]
    first = engine.add(prompts[0], 1, n=2)
    engine.abort(first)
    engine.add(prompts[1], 1, priority=-1)
    engine.run_arrivals([])
    assert engine.n_computed <= n_distinct(prompts) + BLOCK
