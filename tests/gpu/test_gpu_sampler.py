"""The GPU's sampler: deterministic rows against the CPU's sampler, and independence of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_support import DEVICE, on_device_only, on_kernels
from msgspec.structs import replace
from sampler_support import DRAWN, GREEDY, VOCAB, history, make, normal, sample
from torch import Tensor

from radixkv.errors import DeviceError
from radixkv.runtime.device.sampling.cpu import Sampler
from radixkv.runtime.step.plan import RowSampling
from radixkv.wire.messages import TokenLogprobs, unpack_tokens
from radixkv.wire.sampling import MAX_CHOICES

pytestmark = on_kernels

GAP = 1e-3
"""Allowed difference of two log-probabilities."""


def deterministic_rows(logits: Tensor) -> list[RowSampling]:
    """Returns settings for eight rows of logits, with which tokens are deterministic."""
    likely = logits.float().argsort(descending=True)[:, :50].tolist()
    return [
        replace(GREEDY, n_logprobs=5),
        replace(GREEDY, banned=(likely[1][0],), n_logprobs=0),
        replace(GREEDY, logit_bias=((3, 2.0), (likely[2][7], 30.0)), n_logprobs=20),
        replace(DRAWN, top_k=1, n_logprobs=1),
        replace(GREEDY, repetition_penalty=2.0, history=history(likely[4][:20] * 3), n_logprobs=3),
        replace(GREEDY, frequency_penalty=0.7, presence_penalty=0.4, history=history([1], likely[5][:9] * 2)),
        replace(
            GREEDY,
            repetition_penalty=0.7,
            presence_penalty=-0.5,
            logit_bias=((likely[6][3], 0.5),),
            banned=(likely[6][1],),
            history=history(likely[6][:9], likely[6][4:20]),
            n_logprobs=2,
        ),
        replace(DRAWN, temperature=1e-6, top_p=0.5, min_p=0.2),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_rows_are_as_on_the_cpu(dtype: torch.dtype) -> None:
    """Runs many steps, so that output tokens change later ones by penalties."""
    first = normal(8).to(dtype)
    rows = deterministic_rows(first)
    cpu, device = Sampler(8, VOCAB), make(8)
    for step in range(12 if DEVICE == "cuda" else 4):
        logits = (first.float() + normal(8, seed=1 + step, scale=0.1)).to(dtype)
        expected = cpu.sample(logits.float(), range(8), rows)
        tokens, logprobs = sample(logits, rows, device)
        assert tokens == [choice.token for choice in expected if choice is not None]
        for found, choice in zip(logprobs, expected, strict=True):
            assert choice is not None
            check_logprobs(found, choice.logprobs)
        rows = [replace(row, history=None, index=step + 1) for row in rows]


def check_logprobs(found: TokenLogprobs | None, expected: TokenLogprobs | None) -> None:
    if found is None or expected is None:
        assert found is expected
        return
    assert (found.rank, found.top_ids) == (expected.rank, expected.top_ids)
    assert found.logprob == pytest.approx(expected.logprob, abs=GAP)
    np.testing.assert_allclose(
        np.frombuffer(found.top_logprobs, "<f4"), np.frombuffer(expected.top_logprobs, "<f4"), atol=GAP
    )


@pytest.mark.parametrize("size", [VOCAB, MAX_CHOICES + 2])
def test_the_candidates_of_the_widest_beams_are_as_on_the_cpu(size: int) -> None:
    """A beam search lists more tokens than a request may ask for, in a small vocabulary all of them."""
    logits = normal(3, size=size)
    rows = [replace(GREEDY, n_logprobs=n) for n in (MAX_CHOICES + 2, 1, MAX_CHOICES)]
    _, logprobs = sample(logits, rows)
    for found, choice in zip(logprobs, Sampler(3, size).sample(logits, range(3), rows), strict=True):
        assert choice is not None
        check_logprobs(found, choice.logprobs)


@pytest.mark.parametrize("n_logprobs", [0, 1, 20])
def test_scores_are_as_on_the_cpu(n_logprobs: int) -> None:
    logits = normal(9).bfloat16()
    targets = np.array([0, 1, VOCAB - 1, *logits[3:].float().argmax(-1).tolist()])
    found = make(2).score(logits.to(DEVICE), targets, n_logprobs)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    expected = Sampler(1, VOCAB).score(logits.float(), targets, n_logprobs)
    scores = found.collect()
    assert scores is not None
    assert expected is not None
    for score, other in zip(scores, expected, strict=True):
        check_logprobs(score, other)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_scores_of_a_row_that_is_not_finite(bad: float) -> None:
    logits = normal(3)
    logits[1, 77] = bad
    found = make(1).score(logits.to(DEVICE), np.array([5, 6, 7]), 2)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert found.collect() is None


def test_equal_logits_come_by_their_ids() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, ::1000] = 1.0
    logits[2, 4000:4300] = 2.0
    row = replace(DRAWN, top_k=12, n_logprobs=20)
    tokens, logprobs = sample(logits, [replace(row, seed=i) for i in range(3)])
    listed = [unpack_tokens(found.top_ids) for found in logprobs if found is not None]
    assert list(listed[0]) == list(range(20))
    assert list(listed[1]) == [*range(0, VOCAB, 1000), *range(1, 11)]
    assert list(listed[2]) == list(range(4000, 4020))
    assert tokens[0] < 12
    assert tokens[1] in listed[1][:12]
    assert 4000 <= tokens[2] < 4012


def mixed_rows(n: int) -> list[RowSampling]:
    """Returns rows with settings of all kinds, each with its own seed."""
    kinds = [
        replace(DRAWN, temperature=0.7),
        replace(DRAWN, top_p=0.9),
        replace(DRAWN, top_k=40, top_p=0.9),
        replace(DRAWN, min_p=0.01, n_logprobs=3),
        replace(DRAWN, logit_bias=((7, 3.0),), top_k=5),
        replace(DRAWN, presence_penalty=1.0, history=history([1, 2], [3, 4]), n_logprobs=0),
        replace(DRAWN, top_k=500, temperature=2.0),
        replace(GREEDY, n_logprobs=2),
    ]
    return [replace(kinds[i % len(kinds)], seed=i * 0x9E3779B97F4A7C15, index=i) for i in range(n)]


def test_a_row_does_not_depend_on_the_others() -> None:
    n = 256 if DEVICE == "cuda" else 24
    logits, rows = normal(n, scale=2.0).bfloat16(), mixed_rows(n)
    tokens, logprobs = sample(logits, rows)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(3)).tolist()
    again = sample(logits[order], [rows[i] for i in order])
    assert again == ([tokens[i] for i in order], [logprobs[i] for i in order])
    for i in range(0, n, 1 if DEVICE == "cuda" else 5):
        assert sample(logits[i : i + 1], [rows[i]]) == ([tokens[i]], [logprobs[i]])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_touches_no_other(bad: float) -> None:
    logits, rows = normal(16), [replace(row, n_logprobs=4) for row in mixed_rows(16)]
    tokens, logprobs = sample(logits, rows)
    damaged = logits.clone()
    damaged[::2, 4097] = bad
    found, found_logprobs = sample(damaged, rows)
    assert found == [-1 if i % 2 == 0 else token for i, token in enumerate(tokens)]
    assert found_logprobs == [None if i % 2 == 0 else each for i, each in enumerate(logprobs)]


def test_a_row_that_is_not_finite_does_not_change_its_history() -> None:
    """A row that is not finite keeps its history; a finite row's history grows."""
    logits = torch.zeros(2, VOCAB)
    logits[:, 0], logits[:, 6] = 1.0, 0.9
    damaged = logits.clone()
    damaged[0, 9] = torch.nan
    rows = [replace(GREEDY, presence_penalty=0.5, history=history([1]))] * 2
    sampler = make(2)
    assert sample(damaged, rows, sampler)[0] == [-1, 0]
    rows = [replace(row, history=None) for row in rows]
    assert sample(logits, rows, sampler)[0] == [0, 6]
    assert sample(logits, rows, sampler)[0] == [6, 0]


def test_a_slot_forgets_its_former_request() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 1.0, 0.9
    sampler = make(3)
    row = replace(GREEDY, presence_penalty=2.0, history=history([1], [5, 5]))
    assert sample(logits, [row], sampler, [2])[0] == [6]
    assert sample(logits, [replace(row, history=history([1]))], sampler, [2])[0] == [5]
    assert sample(logits, [replace(GREEDY, logit_bias=((8, 5.0),))], sampler, [2])[0] == [8]
    assert sample(logits, [replace(GREEDY, logit_bias=((9, 5.0),))], sampler, [2])[0] == [9]
    with pytest.raises(DeviceError, match="no history"):
        sample(logits, [replace(row, history=None)], sampler, [2])


def test_more_rows_with_edits_than_one_chunk() -> None:
    n = 300 if DEVICE == "cuda" else 130
    logits = torch.zeros(n, 200)
    rows = [replace(GREEDY, logit_bias=((i % 200, 1.0),)) for i in range(n)]
    assert sample(logits, rows)[0] == [i % 200 for i in range(n)]


def test_huge_logits_and_edits_are_drawn_from() -> None:
    """Edits that would overflow float32 stay finite: the likeliest token is drawn."""
    logits = torch.full((3, VOCAB), -3e38)
    logits[:, 8000] = 3e38
    rows = [
        replace(DRAWN, logit_bias=((5, 1.0),)),
        replace(DRAWN, repetition_penalty=1e-9, history=history([8000])),
        replace(DRAWN, top_k=3, repetition_penalty=1e-9, history=history([8000, 1])),
    ]
    assert sample(logits, rows)[0] == [8000] * 3


@pytest.mark.parametrize("size", [1, 3, 64, 4096, 4097])
def test_sizes_of_vocabularies(size: int) -> None:
    logits = normal(4, size=size, scale=0.5)
    rows = [
        DRAWN,
        replace(DRAWN, top_k=2),
        replace(DRAWN, top_p=0.5),
        replace(GREEDY, logit_bias=((size - 1, 99.0),)),
    ]
    tokens, logprobs = sample(logits, [replace(row, n_logprobs=20) for row in rows])
    assert tokens[3] == size - 1
    assert all(found is not None and len(found.top_ids) == 4 * min(20, size) for found in logprobs)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (replace(DRAWN, logit_bias=((VOCAB, 1.0),)), "not all between 0"),
        (replace(DRAWN, banned=(-1,)), "not all between 0"),
        (replace(DRAWN, presence_penalty=1.0, history=history([VOCAB])), "not all between 0"),
        (replace(DRAWN, presence_penalty=1.0), "no history"),
        (replace(DRAWN, banned=tuple(range(VOCAB))), "are banned"),
    ],
)
def test_rows_that_cannot_be(row: RowSampling, text: str) -> None:
    with pytest.raises(DeviceError, match=text):
        sample(normal(1), [row])


def test_targets_outside_the_vocabulary() -> None:
    with pytest.raises(DeviceError, match="not between 0"):
        make(1).score(normal(1).to(DEVICE), np.array([VOCAB]), 0)


def test_a_warm_up_resets_the_slots() -> None:
    sampler = make(1)
    sampler.warm_up(torch.float32)
    with pytest.raises(DeviceError, match="no history"):
        sample(normal(1), [replace(DRAWN, presence_penalty=1.0)], sampler)


@on_device_only
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_nothing_waits_and_memory_does_not_grow() -> None:
    rows = [replace(row, n_logprobs=5) for row in mixed_rows(64)]
    logits = normal(64).bfloat16().to(DEVICE)
    greedy, finite = torch.ones(2, 64, dtype=torch.int32, device=DEVICE)
    sampler, reserved = make(64), []
    for step in range(20):
        if step == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            sampled = sampler.sample(logits, range(64), rows, greedy, finite)
            scored = sampler.score(logits, np.arange(64), 5)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert all(found is not None for found in sampled.collect())
        assert scored.collect() is not None
        reserved.append(torch.cuda.memory_reserved())
        rows = [replace(row, index=row.index + 1) for row in rows]
    assert len(set(reserved[2:])) == 1
