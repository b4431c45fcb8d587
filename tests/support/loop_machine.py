"""Random sessions of a frontend with the loop, as a Hypothesis state machine: the rules of the wire hold."""

from __future__ import annotations

import sys

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv.wire.cache_messages import Pinned
from radixkv.wire.messages import PromptPin
from support.fake_grammars import FakeGrammar
from support.loop_frontend import Frontend

MOMENT_S = 0.002
"""How long the runtime process waits for messages before it asks the loop again."""


class LoopMachine(RuleBasedStateMachine):
    """``Frontend`` checks each message as it comes.

    Device and loop share a clock on which steps take time. Messages arrive between any two moments of a step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.caught_before = sys.exc_info()[1]
        self.grammars: dict[str, FakeGrammar] = {}
        """By id of the request."""

    @initialize(
        n_pages=st.sampled_from((16, 24, 48)),
        compiles_at_once=st.booleans(),
        step_s=st.sampled_from((0.0, 0.02, 1.0)),
    )
    def start(self, n_pages: int, compiles_at_once: bool, step_s: float) -> None:
        self.front = Frontend(
            n_pages=n_pages,
            eos_token_ids=frozenset({107, 119}),
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_queued_requests=4,
            queue_timeout_s=50,
        )
        self.front.grammars.is_immediate = compiles_at_once
        self.front.device.step_s = step_s

    @precondition(lambda self: len(self.front.received) < 10)
    @rule(
        first=st.integers(1, 3),
        length=st.integers(1, 29),
        priority=st.sampled_from((0, 0, 1)),
        n=st.sampled_from((1, 2, 4)),
        max_tokens=st.integers(1, 19),
        prompt_logprobs=st.sampled_from((None, None, 0)),
        frequency_penalty=st.sampled_from((0.0, 1.0)),
        logprobs=st.sampled_from((None, 1)),
        grammar=st.sampled_from((None, None, FakeGrammar(), FakeGrammar(7, 9), FakeGrammar(n_accepted=1))),
        ttl_s=st.sampled_from((0, 0, 30)),
        is_beam_search=st.sampled_from((False, False, True)),
    )
    def submit(
        self,
        first: int,
        length: int,
        priority: int,
        ttl_s: int,
        grammar: FakeGrammar | None,
        is_beam_search: bool,
        **sampling: object,
    ) -> None:
        name = f"r{len(self.front.received)}"
        pins = [PromptPin(length, ttl_s)] if ttl_s else []
        if is_beam_search:
            kept = {name: sampling[name] for name in ("n", "max_tokens")}
            self.front.submit(
                name, range(first, first + length), priority=priority, pins=pins, use_beam_search=True, **kept
            )
            return
        if grammar is not None:
            sampling["structured_outputs"] = grammar.specification
            self.grammars[name] = grammar
        self.front.submit(name, range(first, first + length), priority=priority, pins=pins, **sampling)

    @rule(which=st.integers(0, 9), refuses=st.booleans())
    def compile(self, which: int, refuses: bool) -> None:
        self.front.grammars.finish(which, refuses=refuses)

    @rule(first=st.integers(1, 3), length=st.integers(1, 29), ttl_s=st.sampled_from((0, 10, 100)))
    def pin(self, first: int, length: int, ttl_s: int) -> None:
        assert isinstance(self.front.pin(range(first, first + length), ttl_s), Pinned)

    @precondition(lambda self: self.front.loop.seconds_for_arrivals)
    @rule(n_moments=st.sampled_from((1, 3, 1000)))
    def wait_for_arrivals(self, n_moments: int) -> None:
        """The runtime process waits, until it must launch the next step or a message comes."""
        for _ in range(n_moments):
            self.front.now += min(MOMENT_S, self.front.loop.seconds_for_arrivals)

    @precondition(lambda self: self.front.loop.has_work)
    @rule(n_turns=st.integers(1, 4))
    def turn(self, n_turns: int) -> None:
        for _ in range(n_turns):
            if self.front.loop.has_work:
                self.front.turn()

    @precondition(lambda self: self.front.received)
    @rule(which=st.integers(0, 9), choice=st.sampled_from((None, 0, 1)))
    def cancel(self, which: int, choice: int | None) -> None:
        self.front.cancel(f"r{which % len(self.front.received)}", choice)

    @rule()
    def flush(self) -> None:
        self.front.flush()

    @rule(step_s=st.sampled_from((0.0, 0.02, 0.3)))
    def change_speed(self, step_s: float) -> None:
        """Later steps take another time."""
        self.front.device.step_s = step_s

    @rule()
    def fail(self) -> None:
        """The next launched step will fail."""
        self.front.device.fail_steps.add(self.front.stats().steps_total)

    @rule(batch_slot=st.integers(0, 3))
    def make_nan(self, batch_slot: int) -> None:
        """The next row of the slot will have NaN logits."""
        self.front.device.nan_logits_slots.add(batch_slot)

    @rule(seconds=st.integers(0, 20))
    def wait(self, seconds: int) -> None:
        self.front.now += seconds

    @invariant()
    def only_a_busy_device_is_waited_for(self) -> None:
        if hasattr(self, "front") and self.front.loop.seconds_for_arrivals:
            assert self.front.device.busy_until > self.front.now

    def teardown(self) -> None:
        """All requests end, and all pages come back."""
        if not hasattr(self, "front") or sys.exc_info()[1] is not self.caught_before:
            return
        self.front.device.fail_steps.clear()
        self.front.run()
        assert all(received.terminal is not None for received in self.front.received.values())
        for name, grammar in self.grammars.items():
            for output in self.front.received[name].tokens.values():
                matcher = FakeGrammar(grammar.modulus, grammar.length).new_matcher()
                assert all(matcher.accept(token) for token in output), "an output does not match its grammar"
        stats = self.front.stats()
        assert stats.n_pages_free + stats.n_pages_evictable == self.front.device.n_pages
