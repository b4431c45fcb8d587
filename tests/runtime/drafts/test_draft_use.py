"""What became of a request's drafts is told at its end, and forgotten."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from radixkv.runtime.drafts.sources import Guess, Source
from radixkv.runtime.drafts.text_drafts import TextDrafts
from radixkv.runtime.protocols.drafts import Drafts
from radixkv.runtime.request import Request
from radixkv.wire.messages import DraftUse
from support.engine import token_bytes
from support.fake_device import expected_output, unpack
from support.loop_frontend import NAMESPACE, Frontend, done, failed

MAX_DRAFTS = 3


class GoesWrong(Source):
    """Guesses right tokens, and then a wrong one."""

    def guess(self, request: Request, n_tokens: int) -> Guess | None:
        tokens = expected_output(NAMESPACE, unpack(bytes(request.known_key)), n_tokens)
        return Guess("prompt", 3, token_bytes([*tokens[:-1], (tokens[-1] + 1) % 7]))


class Counting(TextDrafts):
    """Also counts the drafts itself, of all requests together. Steps take a second, searches no time."""

    n_drafts = 0
    n_accepted = 0
    now = 0.0

    def __init__(self) -> None:
        super().__init__(GoesWrong(), MAX_DRAFTS, overlaps=False, clock=lambda: self.now)

    def step_done(self, *arguments: Any, **options: Any) -> None:
        self.now += 1.0
        super().step_done(*arguments, **options)

    def verified(self, request: Request, n_drafts: int, n_accepted: int) -> None:
        self.n_drafts += n_drafts
        self.n_accepted += n_accepted
        super().verified(request, n_drafts, n_accepted)

    @property
    def use(self) -> DraftUse:
        return DraftUse(self.n_accepted, self.n_drafts - self.n_accepted)


def frontend(drafts: Drafts) -> Frontend:
    return Frontend(drafts=drafts, queue_timeout_s=100.0)


def test_done_has_the_drafts_of_all_choices() -> None:
    drafts = Counting()
    front = frontend(drafts)
    total = DraftUse()
    for request_id, n in (("a", 1), ("b", 3), ("c", 1)):
        front.submit(request_id, n=n, temperature=0.0, max_tokens=20)
    front.run()
    for request_id, n in (("a", 1), ("b", 3), ("c", 1)):
        use = done(front.received[request_id]).drafts
        assert use is not None
        assert 0 < use.n_rejected < use.n_accepted <= 19 * n
        total += use
    assert total == drafts.use
    by_position = drafts.stats().accepted_by_position
    assert len(by_position) == MAX_DRAFTS
    assert sum(by_position) == drafts.n_accepted
    assert by_position[0] >= by_position[1] > by_position[2] == 0, "the last of three drafts is wrong"


def test_without_drafts_there_is_no_use() -> None:
    assert done(frontend(Drafts()).serve("a")).drafts is None
    counting = Counting()
    assert done(frontend(counting).serve("a", max_tokens=1, temperature=0.0)).drafts == DraftUse()


def fail(front: Frontend, request_id: str) -> None:
    """Makes the logits of the only request wrong until it fails."""
    while front.received[request_id].terminal is None:
        front.device.nan_logits_slots |= {request.batch_slot for request in front.scheduler.running}
        front.turn()
    front.device.nan_logits_slots.clear()


def test_nothing_is_left_of_requests_however_they_end() -> None:
    """An id that is used again has only the drafts of its new request."""
    drafts = Counting()
    front = frontend(drafts)
    ids = [f"r{index}" for index in range(200)]
    for request_id, end in zip(ids, cycle(("length", "cancel", "cancel a choice", "fail")), strict=False):
        n_before = drafts.n_drafts
        front.submit(request_id, n=2, temperature=0.0, max_tokens=12)
        front.turn(3)
        assert drafts.n_drafts > n_before
        if end == "fail":
            fail(front, request_id)
            assert failed(front.received[request_id]).code == "numerical_error"
        elif end != "length":
            front.cancel(request_id, 1 if end == "cancel a choice" else None)
        front.run()
        if end != "fail":
            assert done(front.received[request_id]).drafts != DraftUse()
    for request_id in ids:
        front.submit(request_id, temperature=0.0)
        front.cancel(request_id)
        assert done(front.received[request_id]).drafts == DraftUse()
