"""Plans of the loop that wait for all results, because their rows may have drafts."""

from __future__ import annotations

from radixkv.runtime.protocols.drafts import Drafts
from radixkv.wire import messages as wire
from support.loop_frontend import PROMPT, Frontend, failed


class WaitingDrafts(Drafts):
    """Wants all results before each plan."""

    def wants_results(self, *, has_prompts: bool) -> bool:
        return True


def test_a_prompt_is_pinned_before_the_next_plan_evicts_pages() -> None:
    front = Frontend(n_pages=24, max_num_seqs=3, max_num_batched_tokens=100, drafts=WaitingDrafts())
    front.submit("running", range(50, 54), max_tokens=20)
    front.submit("pinned", pins=[wire.PromptPin(len(PROMPT), 60.0)])
    front.submit("other", range(60, 71))
    front.turn()
    front.submit("large", range(100, 168), max_tokens=1)
    front.run()
    assert front.explain(PROMPT).n_pinned == 8
    assert front.explain(range(60, 71)).n_cached < 8, "it was used later, but not pinned"


def test_the_choices_beside_one_that_fails_have_no_row_more() -> None:
    front = Frontend(drafts=WaitingDrafts())
    front.submit("a", n=3, max_tokens=20)
    front.submit("b", range(30, 50), max_tokens=20)
    front.turn(3)
    victim = next(request for request in front.scheduler.running if (request.id, request.choice) == ("a", 1))
    while front.received["a"].terminal is None:
        if victim.batch_slot >= 0:
            front.device.nan_logits_slots.add(victim.batch_slot)
        front.turn()
    assert failed(front.received["a"]).code == "numerical_error"
    (launched,) = front.scheduler.launched_plans
    assert [request.id for request in launched.requests] == ["b"]
