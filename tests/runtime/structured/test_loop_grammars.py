"""Requests with grammars in the loop: compiled before they are queued, masked in the second half of a step."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest

from radixkv.errors import DeviceError, DeviceLost, UnsupportedFeature
from radixkv.runtime.request import Request
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import TokenMasks
from radixkv.wire.messages import Drain
from support.fake_device import FakeStep, expected_output
from support.fake_grammars import END, FakeCompiler, FakeGrammar
from support.loop_frontend import NAMESPACE, PROMPT, Frontend, done, failed

GRAMMAR = FakeGrammar()
LONG = FakeGrammar(7, 9)


def submit(front: Frontend, name: str, grammar: FakeGrammar, **sampling: object) -> None:
    front.submit(name, structured_outputs=grammar.specification, max_tokens=20, **sampling)


def expected(grammar: FakeGrammar, n_tokens: int = 20, **options: object) -> list[int]:
    return expected_output(NAMESPACE, PROMPT, n_tokens, **{"seed": 5, "grammar": grammar, **options})


def test_outputs_match_their_grammars_beside_requests_without() -> None:
    front = Frontend()
    front.submit("free")
    submit(front, "short", GRAMMAR, n=2)
    submit(front, "long", LONG)
    front.run()
    assert front.received["free"].tokens[0] == expected_output(NAMESPACE, PROMPT, 6, seed=5)
    assert front.received["short"].tokens == {0: expected(GRAMMAR), 1: expected(GRAMMAR, seed=6)}
    assert front.received["long"].tokens[0] == expected(LONG)
    assert front.received["long"].tokens[0][-1] == END
    assert done(front.received["long"]).finish_reason == "stop"


def test_masks_are_filled_after_the_next_launch_and_the_last_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch n+1, result n, sample n+1: the device computes step n+1 while the host fills its masks."""
    front = Frontend()
    trace = front.device.trace
    sample = FakeStep.sample

    def traced(step: FakeStep, masks: TokenMasks | None) -> FakeStep:
        trace.append(f"sample {step.plan.step}")
        return sample(step, masks)

    monkeypatch.setattr(FakeStep, "sample", traced)
    submit(front, "a", LONG)
    front.run()
    for step in range(1, 8):
        order = [trace.index(event) for event in (f"launch {step}", f"result {step - 1}", f"sample {step}")]
        assert all(one < other for one, other in pairwise(order))


def test_a_request_is_queued_when_its_grammar_is_compiled() -> None:
    front = Frontend()
    front.grammars.is_immediate = False
    submit(front, "a", GRAMMAR)
    front.turn()
    assert front.loop.has_work
    assert front.loop.is_waiting
    front.submit("b")
    front.turn()
    assert not front.loop.is_waiting, "others do not wait for the grammar"
    front.grammars.finish(0)
    front.run()
    assert front.received["a"].tokens[0] == expected(GRAMMAR)


def test_a_device_that_is_lost_is_noticed_while_a_grammar_is_compiled() -> None:
    front = Frontend()
    front.grammars.is_immediate = False
    submit(front, "a", GRAMMAR)
    front.turn()
    front.device.loss = "a rank has ended"
    with pytest.raises(DeviceLost, match="a rank has ended"):
        front.turn()


def test_a_refused_grammar_fails_its_request_alone() -> None:
    front = Frontend()
    front.grammars.is_immediate = False
    submit(front, "a", GRAMMAR)
    submit(front, "b", GRAMMAR)
    front.grammars.finish(0, refuses=True)
    front.run()
    refusal = failed(front.received["a"])
    assert (refusal.code, refusal.param) == ("invalid_request", "structured_outputs")
    assert front.received["b"].tokens[0] == expected(GRAMMAR)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_request_is_cancelled_while_its_grammar_is_compiled(is_compiled: bool) -> None:
    front = Frontend()
    front.grammars.is_immediate = False
    submit(front, "a", GRAMMAR, n=2)
    front.turn()
    if is_compiled:
        front.grammars.finish(0)
    front.cancel("a")
    assert done(front.received["a"]).finish_reason == "abort"
    assert not front.loop.has_work
    front.grammars.finish(0)
    assert front.serve("canary").tokens[0] == expected_output(NAMESPACE, PROMPT, 6, seed=5)


@pytest.mark.parametrize("choice", [0, 1])
def test_one_choice_is_cancelled_while_the_grammar_is_compiled(choice: int) -> None:
    front = Frontend()
    front.grammars.is_immediate = False
    submit(front, "a", GRAMMAR, n=2)
    front.cancel("a", choice)
    front.cancel("a", choice)
    front.grammars.finish(0)
    front.run()
    received = front.received["a"]
    assert received.finish_reasons[choice] == "abort"
    assert received.tokens[1 - choice] == expected(GRAMMAR, seed=6 - choice)


def test_a_rejected_token_fails_one_request() -> None:
    front = Frontend()
    submit(front, "a", FakeGrammar(n_accepted=1))
    submit(front, "b", GRAMMAR)
    front.run()
    assert failed(front.received["a"]).code == "grammar_error"
    assert front.received["b"].tokens[0] == expected(GRAMMAR)


def test_the_grammar_wins_over_min_tokens_and_ignore_eos() -> None:
    """The end token is banned while another may come, and ends the output also with ``ignore_eos``."""
    front = Frontend(eos_token_ids=frozenset({END}))
    submit(front, "a", GRAMMAR, min_tokens=12, ignore_eos=True)
    front.run()
    assert front.received["a"].tokens[0] == expected(GRAMMAR, min_tokens=12, banned=(END,))
    assert done(front.received["a"]).finish_reason == "stop"


def test_the_end_token_is_banned_before_min_tokens_and_not_after() -> None:
    """The grammar allows to end after the third token or the fourth."""
    grammar = FakeGrammar(100, length=4)
    lengths = set()
    for seed in range(60):
        front = Frontend(eos_token_ids=frozenset({END}))
        submit(front, "a", grammar, min_tokens=3, seed=seed)
        front.run()
        tokens = front.received["a"].tokens[0]
        assert tokens == expected(grammar, seed=seed, min_tokens=3, banned=(END,))
        lengths.add(len(tokens))
    assert lengths == {4, 5}, "both ends occur"


def test_a_cancelled_choice_leaves_nothing_behind() -> None:
    front = Frontend()
    front.grammars.is_immediate = False
    submit(front, "forgotten", GRAMMAR, n=2)
    front.cancel("forgotten", 0)
    front.run()
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Request and one.id == "forgotten"]


def test_a_step_that_fails_in_its_second_half_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    front = Frontend()
    sample, failures = FakeStep.sample, [3, 7]

    def sample_or_fail(step: FakeStep, masks: TokenMasks | None) -> FakeStep:
        if masks is not None and step.plan.step in failures:
            failures.remove(step.plan.step)
            front.device.drop_newest()
            raise DeviceError("the sampling failed")
        return sample(step, masks)

    monkeypatch.setattr(FakeStep, "sample", sample_or_fail)
    submit(front, "a", LONG)
    submit(front, "b", GRAMMAR)
    front.run()
    assert not failures
    assert front.received["a"].tokens[0] == expected(LONG)
    assert front.received["b"].tokens[0] == expected(GRAMMAR)


def test_a_step_that_waits_for_masks_is_discarded_with_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    front = Frontend()
    launch, launched = front.device.launch, []

    def keeping(plan: StepPlan) -> FakeStep:
        launched.append(launch(plan))
        return launched[-1]

    monkeypatch.setattr(front.device, "launch", keeping)
    submit(front, "a", LONG)
    front.turn(3)
    front.device.fail_steps.add(front.stats().steps_total - 1)
    front.run()
    assert all(step.is_sampled for step in launched), "also those that were discarded"
    assert front.received["a"].tokens[0] == expected(LONG)


def test_a_drained_loop_still_compiles_what_it_has_taken() -> None:
    front = Frontend()
    front.grammars.is_immediate = False
    submit(front, "a", GRAMMAR)
    front.loop.receive(Drain())
    front.run()
    assert front.received["a"].tokens[0] == expected(GRAMMAR)


def test_a_full_queue_fails_a_request_when_its_grammar_is_compiled() -> None:
    front = Frontend(max_queued_requests=1)
    front.grammars.is_immediate = False
    submit(front, "a", GRAMMAR)
    front.submit("b")
    front.grammars.finish(0)
    front.loop.check()
    front.turn()
    assert failed(front.received["a"]).code == "queue_full"
    front.run()
    assert front.received["b"].tokens[0] == expected_output(NAMESPACE, PROMPT, 6, seed=5)


def test_requests_that_wait_for_grammars_are_bounded_and_leave_others_their_room() -> None:
    front = Frontend(max_queued_requests=2)
    front.grammars.is_immediate = False
    for name in "abc":
        submit(front, name, GRAMMAR)
    assert failed(front.received["c"]).code == "queue_full"
    front.submit("free")
    front.cancel("a")
    submit(front, "d", GRAMMAR)
    front.run()
    for name in "bd":
        assert front.received[name].tokens[0] == expected(GRAMMAR)
    assert front.received["free"].tokens[0] == expected_output(NAMESPACE, PROMPT, 6, seed=5)


def test_a_request_may_time_out_while_its_grammar_is_compiled() -> None:
    front = Frontend(queue_timeout_s=5.0)
    front.grammars.is_immediate = False
    submit(front, "old", GRAMMAR, n=2)
    front.now = 3.0
    submit(front, "young", GRAMMAR)
    front.now = 5.1
    front.turn()
    assert failed(front.received["old"]).code == "queue_timeout"
    assert front.received["young"].terminal is None
    assert list(front.grammars.pending) == [1], "it is not compiled for nobody"
    front.run()
    assert front.received["young"].tokens[0] == expected(GRAMMAR)


def test_the_time_of_compiling_counts_for_the_timeout_in_the_queue() -> None:
    front = Frontend(max_num_seqs=1, queue_timeout_s=5.0)
    front.grammars.is_immediate = False
    front.submit("running", max_tokens=60)
    front.turn()
    submit(front, "old", GRAMMAR)
    front.now = 3.0
    front.submit("young")
    front.grammars.finish(0)
    front.turn()
    front.now = 5.1
    front.turn()
    assert failed(front.received["old"]).code == "queue_timeout"
    assert front.received["young"].terminal is None


def test_without_grammars_a_structured_request_is_refused_by_name() -> None:
    def refuse() -> FakeCompiler:
        raise UnsupportedFeature("this engine has no grammars", param="structured_outputs")

    front = Frontend(open_grammars=refuse)
    submit(front, "a", GRAMMAR)
    refusal = failed(front.received["a"])
    assert (refusal.code, refusal.param) == ("unsupported_feature", "structured_outputs")
    assert not front.loop.has_work
