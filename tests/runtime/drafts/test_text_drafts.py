"""Drafts begin and end by measured times, on a simulated device whose times are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle, islice
from random import Random

import pytest

from radixkv.runtime.drafts.sources import Guess, OwnText
from radixkv.runtime.drafts.text_drafts import TextDrafts
from radixkv.runtime.protocols.drafts import Drafts
from radixkv.runtime.request import Phase, Request
from radixkv.runtime.step.plan import Row, StepPlan
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.wire.messages import pack_tokens, unpack_tokens
from radixkv.wire.stats import SourceStats
from support.cases import covering, rest_nightly

Text = Callable[[Random, int], list[int]]


def repeated(rng: Random, n_tokens: int) -> list[int]:
    """A text that goes round and round."""
    return list(islice(cycle([rng.randrange(1 << 20) for _ in range(40)]), n_tokens))


def unrelated(rng: Random, n_tokens: int) -> list[int]:
    return [rng.randrange(1 << 20) for _ in range(n_tokens)]


def misleading(rng: Random, n_tokens: int) -> list[int]:
    """Endings come again, and then something new follows."""
    phrase = [rng.randrange(1 << 20) for _ in range(9)]
    return [token for _ in range(-(-n_tokens // 12)) for token in (*phrase, *unrelated(rng, 3))][:n_tokens]


@dataclass
class Simulation:
    """Rows that decode texts which are known in advance.

    Args:
        text: of each row.
        n_rows: rows of each step.
        step_s: of a step by its rows, a draft counting as one.
        wait_s: what it costs to wait for a result before the next plan.
    """

    text: Text
    n_rows: int
    step_s: Callable[[int], float]
    wait_s: float
    overlaps: bool = True
    search_s: float = 0.0
    """How long a guess takes, where device and host take turns."""
    now: float = 0.0
    rng: Random = field(default_factory=lambda: Random(5))
    n_tokens: int = 0
    n_steps: int = 0
    n_prompts: int = 0
    """Prompts that the next step computes."""
    room: int = 512
    """Most drafts of a step."""
    waits: bool = False
    """Whether the next plan waits for the results before it."""
    prompt_every: int = 0
    """After so many tokens of answers the next step computes a prompt, too; 0: none does."""
    launch_s: float = 0.0
    """How long the launch of such a step takes, behind which the result before it may be taken, and for which the
    device is idle if the step waits. Each prompt takes the device as long, too."""

    def __post_init__(self) -> None:
        source = OwnText((3, 5, 8))

        def guess(request: Request, n_tokens: int) -> Guess | None:
            self.now += self.search_s
            return OwnText.guess(source, request, n_tokens)

        source.guess = guess  # type: ignore[method-assign]
        self.drafts: Drafts = TextDrafts(source, 8, overlaps=self.overlaps, clock=lambda: self.now)
        self.waits = self.drafts.wants_results(has_prompts=False)
        self.requests: list[Request] = []
        self.truths: list[list[int]] = []
        for slot in range(self.n_rows):
            self.requests.append(Request("", Namespace(), bytearray(), 0, 0))
            self.truths.append([])
            self._restart(slot)

    def _restart(self, slot: int) -> None:
        self.truths[slot] = self.text(self.rng, 400 + self.rng.randrange(200))
        prompt = pack_tokens(self.truths[slot][:100])
        self.requests[slot] = Request(f"{slot}", Namespace(), bytearray(prompt), 100, 1000, batch_slot=slot)
        self.requests[slot].phase = Phase.RUNNING

    def run(self, seconds: float) -> float:
        """Returns tokens a second."""
        end, before, begun = self.now + seconds, self.n_tokens, self.now
        while self.now < end:
            self._step()
        return (self.n_tokens - before) / (self.now - begun)

    def _step(self) -> None:
        waits = self.waits
        self.n_steps += 1
        n_prompts, n_before = self.n_prompts, self.n_tokens
        found = [b""] * self.n_rows
        if waits and self.room > 0:
            found = self.drafts.draft(self.requests, [request.max_drafts for request in self.requests], self.room)
        rows = [
            Row(slot, 0, 1 + len(drafts) // TOKEN_BYTES, b"", 0, 0, (), None, n_drafts=len(drafts) // TOKEN_BYTES)
            for slot, drafts in enumerate(found)
        ]
        n_drafts = sum(row.n_drafts for row in rows)
        plan = StepPlan(0, tuple(rows), n_decode=self.n_rows - (n_prompts > 0), n_drafts=n_drafts)
        device_s = self.step_s(self.n_rows + n_drafts) * self.rng.uniform(0.98, 1.02) + n_prompts * self.launch_s
        self.now += device_s + (self.wait_s + self.launch_s * (n_prompts > 0) if waits else 0)
        accepted = []
        for request, truth, drafts in zip(self.requests, self.truths, found, strict=True):
            done, n = len(request.known_key) // TOKEN_BYTES, 0
            for draft, token in zip(unpack_tokens(drafts), truth[done:], strict=False):
                if draft != token:
                    break
                n += 1
            accepted.append(n)
            if drafts:
                self.drafts.verified(request, len(drafts) // TOKEN_BYTES, n)
        requests = list(self.requests)
        for slot, n in enumerate(accepted):
            request, truth = self.requests[slot], self.truths[slot]
            done = len(request.known_key) // TOKEN_BYTES
            request.known_key += pack_tokens(truth[done : done + n + 1])
            self.n_tokens += n + 1
            if len(request.known_key) // TOKEN_BYTES >= len(truth):
                request.phase = Phase.FINISHED
                self._restart(slot)
        if self.prompt_every:
            self.n_prompts = self.n_tokens // self.prompt_every - n_before // self.prompt_every
        self.waits = n_drafts > 0 or self.drafts.wants_results(has_prompts=self.n_prompts > 0)
        is_late = self.n_prompts > 0 and not self.waits
        self.now += self.launch_s * is_late
        self.drafts.step_done(
            plan, requests, self.room, has_waited=waits, is_last=self.waits, device_seconds=device_s
        )
        self.now -= self.launch_s * is_late


def speed_up(
    text: Text, n_rows: int, step_s: Callable[[int], float], *, prompt_every: int, launch_s: float
) -> float:
    """Returns the tokens a second with drafts to those without."""
    tokens_per_s = []
    for drafts in (None, Drafts()):
        simulation = Simulation(text, n_rows, step_s, 1e-3, prompt_every=prompt_every, launch_s=launch_s)
        if drafts is not None:
            simulation.drafts, simulation.waits = drafts, False
        simulation.run(4.0)
        tokens_per_s.append(simulation.run(8.0))
    return tokens_per_s[0] / tokens_per_s[1]


def flat(n_rows: int) -> float:
    """A GPU whose time is that of the weights."""
    return 4e-3 * (1 + 0.004 * n_rows)


def steep(n_rows: int) -> float:
    """A GPU whose time is that of the rows."""
    return 1e-3 * n_rows


def steep_line(n_rows: int) -> float:
    """A GPU whose time is that of both."""
    return 4e-3 * (1 + 0.08 * n_rows)


@pytest.mark.parametrize("n_rows", rest_nightly([1, 8, 32], kept=(0, 1)))
def test_drafts_that_pay_are_used(n_rows: int) -> None:
    simulation = Simulation(repeated, n_rows, flat, wait_s=1e-3)
    simulation.run(2.0)
    without = n_rows / flat(n_rows)
    assert simulation.run(10.0) > (2.0 if n_rows < 32 else 1.7) * without


@pytest.mark.parametrize(
    ("text", "times", "n_rows"),
    covering([misleading, unrelated], [(flat, 1e-3), (steep, 1e-3), (flat, 4e-3)], [8, 32, 1]),
)
def test_drafts_that_do_not_pay_cost_nothing(
    text: Text, times: tuple[Callable[[int], float], float], n_rows: int
) -> None:
    step_s, wait_s = times
    simulation = Simulation(text, n_rows, step_s, wait_s)
    assert simulation.run(12.0) > 0.98 * n_rows / step_s(n_rows)


@pytest.mark.parametrize("prompt_every", rest_nightly([16, 32], kept=(0,)))
def test_steps_with_prompts_between_others_hide_nothing(prompt_every: int) -> None:
    """Without drafts every second step, or every fourth, computes a prompt; results are taken behind its launch."""
    assert speed_up(misleading, 8, flat, prompt_every=prompt_every, launch_s=3e-3) > 1.15


@pytest.mark.parametrize(("n_rows", "prompt_every"), rest_nightly([(32, 64), (32, 128), (8, 16)], kept=(2,)))
def test_no_step_waits_where_the_launch_of_prompts_takes_longer_than_drafts_save(
    n_rows: int, prompt_every: int
) -> None:
    """Drafts would pay if no step computed a prompt."""
    assert speed_up(misleading, n_rows, flat, prompt_every=prompt_every, launch_s=12e-3) > 0.99


def test_right_drafts_that_cost_too_much_are_left() -> None:
    """Each draft takes as long as a row, so that nothing is gained even if all are right."""
    simulation = Simulation(repeated, 32, lambda n_rows: 4e-4 * n_rows, wait_s=2e-3)
    simulation.run(10.0)
    assert simulation.run(30.0) > 0.985 * 32 / (4e-4 * 32)


@pytest.mark.parametrize(("n_rows", "launch_s"), covering([1, 8], [3e-3, 12e-3]))
def test_results_that_are_taken_late_make_steps_without_drafts_no_slower(n_rows: int, launch_s: float) -> None:
    """A draft takes as long as a row. Every second step computes a prompt, and the result before it is late."""
    simulation = Simulation(repeated, n_rows, steep, wait_s=1e-3, prompt_every=2 * n_rows, launch_s=launch_s)
    simulation.run(4.0)
    n_waited, n_steps = simulation.drafts.stats().steps_without_overlap_total, simulation.n_steps
    simulation.run(8.0)
    n_waited = simulation.drafts.stats().steps_without_overlap_total - n_waited
    assert n_waited < 0.01 * (simulation.n_steps - n_steps)


def test_drafts_begin_again_when_texts_change() -> None:
    simulation = Simulation(unrelated, 4, flat, wait_s=1e-3)
    simulation.run(10.0)
    simulation.text = repeated
    for slot in range(4):
        simulation._restart(slot)
    simulation.run(3.0)
    assert simulation.run(5.0) > 1.8 * 4 / flat(4)


def test_nothing_waits_before_a_step_was_measured() -> None:
    """A gain over steps of unknown time is none: the engine would never learn how long they take."""
    simulation = Simulation(repeated, 4, flat, wait_s=1e-3)
    waiting = []
    for _ in range(8):
        simulation._step()
        waiting.append(simulation.waits)
    assert waiting.index(True) >= 3, "the first steps of a request are not measured"


def test_a_device_without_overlap_always_has_drafts() -> None:
    simulation = Simulation(repeated, 2, flat, wait_s=0.0, overlaps=False)
    assert simulation.drafts.wants_results(has_prompts=True)
    simulation.run(1.0)
    assert simulation.run(5.0) > 2.5 * 2 / flat(2)
    simulation = Simulation(unrelated, 2, flat, wait_s=0.0, overlaps=False)
    assert simulation.run(5.0) > 0.99 * 2 / flat(2)


def test_few_rows_of_a_step_without_drafts_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(unrelated, 32, flat, wait_s=1e-3)
    n_searches, search = 0, TextDrafts._guess

    def counting(self: TextDrafts, request: Request) -> object:
        nonlocal n_searches
        n_searches += 1
        return search(self, request)

    monkeypatch.setattr(TextDrafts, "_guess", counting)
    n_tokens = simulation.n_tokens
    simulation.run(4.0)
    assert n_searches <= 17 * (simulation.n_tokens - n_tokens) / 32


@pytest.mark.parametrize("phase", [Phase.PREEMPTED, Phase.WAITING, Phase.PAUSED, Phase.LOADING])
def test_a_request_that_has_lost_its_pages_while_a_step_ran_is_not_searched(
    phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = Simulation(unrelated, 4, flat, wait_s=1e-3)
    simulation.run(1.0)
    searched, search = [], TextDrafts._guess

    def recording(self: TextDrafts, request: Request) -> object:
        searched.append(request.phase)
        return search(self, request)

    monkeypatch.setattr(TextDrafts, "_guess", recording)
    for _ in range(100):
        simulation.requests[2].phase = phase
        simulation._step()
    assert set(searched) == {Phase.RUNNING}


@pytest.mark.nightly
def test_drafts_end_when_steps_without_them_have_become_faster() -> None:
    simulation = Simulation(repeated, 8, lambda n_rows: 3 * flat(n_rows), wait_s=2e-3)
    simulation.run(10.0)
    assert simulation.waits
    simulation.step_s = lambda n_rows: 4e-4 * n_rows
    simulation.run(30.0)
    assert simulation.run(30.0) > 0.985 / 4e-4


def test_drafts_are_counted_by_source_and_steps_by_overlap() -> None:
    simulation = Simulation(repeated, 2, flat, wait_s=1e-3)
    simulation.run(10.0)
    stats = simulation.drafts.stats()
    assert stats.by_source == {"prompt": SourceStats(stats.draft_tokens_total, stats.accepted_tokens_total)}
    assert 0 < stats.accepted_tokens_total < stats.draft_tokens_total
    assert stats.drafts_total / 2 <= stats.steps_without_overlap_total < simulation.n_steps


@pytest.mark.nightly
@pytest.mark.parametrize("room", rest_nightly([0, 2], kept=(1,)))
def test_no_step_waits_for_drafts_that_have_no_room(room: int) -> None:
    simulation = Simulation(repeated, 32, flat, wait_s=1e-3)
    simulation.run(5.0)
    simulation.room = room
    simulation.run(1.0)
    assert simulation.run(5.0) > 0.99 * 32 / flat(32)


def test_idle_time_is_no_cost_of_steps() -> None:
    simulation = Simulation(repeated, 1, flat, wait_s=1e-3)
    for _ in range(20):
        simulation.now += 60.0
        simulation._restart(0)
        simulation.run(0.2)
    assert simulation.run(5.0) > 2 / flat(1)


@pytest.mark.parametrize("n_rows", [1, 8])
def test_a_device_without_overlap_searches_little_where_nothing_is_found(n_rows: int) -> None:
    """A search takes 2% of a step a row."""
    simulation = Simulation(unrelated, n_rows, flat, wait_s=0.0, overlaps=False, search_s=8e-5)
    simulation.run(2.0)
    assert simulation.run(4.0) > 0.99 * n_rows / flat(n_rows)
    simulation.text = repeated
    for slot in range(n_rows):
        simulation._restart(slot)
    simulation.run(2.0)
    assert simulation.run(4.0) > 2 * n_rows / flat(n_rows)
