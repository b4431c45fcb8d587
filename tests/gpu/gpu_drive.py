"""Driving of a runtime loop turn by turn, with its invariants checked after each turn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest.mock import patch

from radixkv import LLM, SamplingParams
from radixkv.runtime.loop import Loop
from radixkv.runtime.step.executor import Executor
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import LaunchedStep
from radixkv.wire.messages import Cancel, Done, Failed, FromRuntime, Submit, Tokens, pack_tokens, unpack_tokens
from radixkv.wire.stats import Stats


def loop_of(llm: LLM) -> Loop:
    return llm._open_loop


def executor_of(llm: LLM) -> Executor:
    return loop_of(llm)._executor


@dataclass
class Drive:
    """A runtime loop and the messages it sent.

    Args:
        llm: used by nothing else.
        checks: whether all invariants are checked after each turn.
    """

    llm: LLM
    checks: bool = True
    answers: dict[str, list[int]] = field(default_factory=dict)
    """Tokens of each request's first choice."""
    ends: dict[str, str] = field(default_factory=dict)
    """Finish reason or failure of each request."""

    def submit(self, name: str, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self.answers[name] = []
        self._take(loop_of(self.llm).receive(Submit(name, pack_tokens(prompt), sampling)))

    def cancel(self, name: str) -> None:
        self._take(loop_of(self.llm).receive(Cancel(name)))

    def turn(self) -> None:
        loop = loop_of(self.llm)
        self._take(loop.turn())
        if self.checks:
            loop.check()

    def run(self, cancels: random.Random | None = None, share: float = 0.0) -> None:
        """Runs to the end; after each turn, cancels a running or waiting request with probability ``share``."""
        while loop_of(self.llm).has_work:
            self.turn()
            if cancels is not None and cancels.random() < share:
                live = [name for name in self.answers if name not in self.ends]
                if live:
                    self.cancel(cancels.choice(live))

    def check_all_ended(self) -> Stats:
        """Checks that each request has ended once and no page is leased; returns the counters."""
        assert self.ends.keys() == self.answers.keys(), "a request has no terminal message"
        loop_of(self.llm).check()
        stats = self.llm.get_metrics()
        assert (stats.n_running, stats.n_waiting) == (0, 0)
        assert stats.n_pages_free + stats.n_pages_evictable == stats.n_pages
        return stats

    def _take(self, messages: Sequence[FromRuntime]) -> None:
        for message in messages:
            match message:
                case Tokens():
                    for item in message.items:
                        assert item.id not in self.ends, "tokens after the terminal message"
                        if item.choice == 0:
                            self.answers[item.id] += unpack_tokens(item.tokens)
                case Done() | Failed():
                    assert message.id not in self.ends, "a second terminal message"
                    self.ends[message.id] = (
                        message.finish_reason if isinstance(message, Done) else f"{message.code}: {message.text}"
                    )


def record(llm: LLM) -> list[StepPlan]:
    """Records the plans that the engine launches from now on; returns the list that they go to."""
    executor = executor_of(llm)
    launch, plans = executor.launch, list[StepPlan]()

    def record_and_launch(plan: StepPlan) -> LaunchedStep:
        plans.append(plan)
        return launch(plan)

    patch.object(executor, "launch", record_and_launch).start()
    return plans
