"""The device's sampler: the distribution against a plain oracle, what is certain against the CPU's sampler."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from kernel_support import DEVICE, on_device_only, on_kernels
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from radixkv.errors import DeviceError
from radixkv.runtime.device.cuda.sampler.sampler import CudaSampler
from radixkv.runtime.device.sampler.sampler import Sampler
from radixkv.runtime.plan import History, RowSampling
from radixkv.wire import TokenLogprobs, unpack_tokens

pytestmark = on_kernels

VOCAB = 9001
"""Three parts of a row, the last of them short."""
N_DRAWS = 20_000
GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, index=0)
DRAWN = replace(GREEDY, temperature=1.0)
GAP = 1e-3
"""How far two right log-probabilities may be apart."""


def history(prompt: Sequence[int], answer: Sequence[int] = ()) -> History:
    return History(array("i", [*prompt, *answer]).tobytes(), len(prompt))


def normal(n_rows: int, *, size: int = VOCAB, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(n_rows, size, generator=torch.Generator().manual_seed(seed)) * scale


def peaked(seed: int = 0, *, n_peaks: int = 40, height: float = 12.0) -> Tensor:
    """[VOCAB]: most of the weight on a few tokens, and some on all others."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCAB, generator=generator)
    places = torch.randperm(VOCAB, generator=generator)[:n_peaks]
    logits[places] += height - 4.0 * torch.rand(n_peaks, generator=generator)
    return logits


def make(n_rows: int, size: int = VOCAB) -> CudaSampler:
    return CudaSampler(n_rows, size, torch.device(DEVICE))


def sample(
    logits: Tensor,
    rows: Sequence[RowSampling],
    sampler: CudaSampler | None = None,
    slots: Sequence[int] | None = None,
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """One step, a slot a row; what the logits were they must be. -1 for a row that is not finite."""
    on_device = logits.to(DEVICE)
    finite = logits.isfinite().all(-1)
    greedy = torch.where(finite, logits.float().argmax(-1), 0).int().to(DEVICE)
    sampler = sampler or make(len(rows), logits.shape[1])
    sampled = sampler.sample(on_device, slots or range(len(rows)), rows, greedy, finite.int().to(DEVICE))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(on_device.cpu().view(torch.uint8), logits.view(torch.uint8))
    tokens = sampled.tokens.tolist()
    assert all(0 <= token < logits.shape[1] for token in tokens)
    return [token if good else -1 for token, good in zip(tokens, finite.tolist(), strict=True)], sampled.collect()


def edited(logits: Tensor, row: RowSampling) -> Tensor:
    """[vocab] float64 after biases, bans and penalties."""
    changed = logits.double().clone()
    for token, bias in row.logit_bias:
        changed[token] += bias
    changed[list(row.banned)] = -torch.inf
    if row.history is not None:
        ids = torch.tensor(unpack_tokens(row.history.tokens))
        said = torch.bincount(ids[row.history.n_prompt :], minlength=len(logits))
        seen = torch.bincount(ids, minlength=len(logits)) > 0
        penalised = torch.where(changed > 0, changed / row.repetition_penalty, changed * row.repetition_penalty)
        changed = torch.where(seen, penalised, changed)
        changed -= row.frequency_penalty * said + row.presence_penalty * (said > 0)
    return changed


def distribution(logits: Tensor, row: RowSampling) -> NDArray[np.float64]:
    """[vocab]: what a token of the row is drawn from, the plain way."""
    order = edited(logits, row).sort(descending=True, stable=True)
    weights = torch.exp((order.values - order.values[0]) / row.temperature)
    if row.top_k:
        weights[row.top_k :] = 0.0
    weights[weights < row.min_p] = 0.0
    before = weights.cumsum(0) - weights
    if row.top_p < 1.0:
        weights[before >= row.top_p * weights.sum()] = 0.0
    probabilities = torch.zeros_like(weights)
    probabilities[order.indices] = weights / weights.sum()
    return probabilities.numpy()


def draws(logits: Tensor, row: RowSampling, n: int = N_DRAWS) -> list[int]:
    """Of as many requests, half of them told apart by their seed, half by their index."""
    tokens: list[int] = []
    for first in range(0, n, 1000):
        rows = [
            replace(row, seed=31 * i if i % 2 else 7, index=5 if i % 2 else i)
            for i in range(first, min(first + 1000, n))
        ]
        tokens += sample(logits.expand(len(rows), -1).contiguous(), rows)[0]
    return tokens


def surprise(tokens: Sequence[int], expected: NDArray[np.float64]) -> float:
    """How many standard deviations above its mean chi-square is; rare tokens count as one."""
    counts = np.bincount(np.array(tokens), minlength=len(expected))
    assert not counts[expected == 0.0].any(), "a token was drawn that may not be"
    wanted = expected * len(tokens)
    common = wanted >= 5.0
    found = np.append(counts[common], counts[~common].sum())
    wanted = np.append(wanted[common], wanted[~common].sum())
    found, wanted = found[wanted > 0.0], wanted[wanted > 0.0]
    n = len(wanted) - 1
    assert n >= 3, "too few kinds of tokens to judge"
    chi_square = float((np.square(found - wanted) / wanted).sum())
    spread = 2.0 / (9.0 * n)
    return float(((chi_square / n) ** (1 / 3) - (1.0 - spread)) / spread**0.5)


CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 1.7},
    "top_p": {"top_p": 0.9},
    "small top_p": {"top_p": 0.5},
    "top_k": {"top_k": 20},
    "large top_k": {"top_k": 300, "temperature": 3.0},
    "min_p": {"min_p": 0.05},
    "top_k and top_p": {"top_k": 50, "top_p": 0.8, "temperature": 1.2},
    "large top_k and top_p": {"top_k": 200, "top_p": 0.97, "temperature": 3.0},
    "min_p and top_p": {"min_p": 0.02, "top_p": 0.9},
    "all": {"top_k": 100, "top_p": 0.95, "min_p": 0.01, "temperature": 1.1},
}


@on_device_only
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_drawn_as_often_as_they_should(name: str) -> None:
    logits = peaked()
    row = replace(DRAWN, **CASES[name])
    assert surprise(draws(logits, row), distribution(logits, row)) < 4.0


@on_device_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits(dtype: torch.dtype) -> None:
    logits = peaked().to(dtype)
    row = replace(DRAWN, temperature=0.9)
    assert surprise(draws(logits, row), distribution(logits, row)) < 4.0


@on_device_only
def test_a_wrong_distribution_would_be_seen() -> None:
    logits = peaked()
    found = draws(logits, replace(DRAWN, temperature=1.5))
    assert surprise(found, distribution(logits, DRAWN)) > 4.0


@on_device_only
@pytest.mark.parametrize("top_k", [0, 30])
def test_edits_come_before_the_draw(top_k: int) -> None:
    logits = peaked()
    likely = logits.argsort(descending=True).tolist()
    row = replace(
        DRAWN,
        top_k=top_k,
        top_p=0.95,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        logit_bias=((likely[5], 1.0), (likely[60], 9.0), (likely[4], -2.0)),
        banned=(likely[0], likely[3]),
        history=history(likely[:10] * 2, likely[5:9] * 3),
    )
    assert surprise(draws(logits, row, N_DRAWS // 4), distribution(logits, row)) < 4.0


def certain_rows(logits: Tensor) -> list[RowSampling]:
    """A row for each of eight rows of logits, whose tokens leave nothing to chance."""
    likely = logits.float().argsort(descending=True)[:, :50].tolist()
    return [
        replace(GREEDY, n_logprobs=5),
        replace(GREEDY, banned=(likely[1][0],), n_logprobs=0),
        replace(GREEDY, logit_bias=((3, 2.0), (likely[2][7], 30.0)), n_logprobs=20),
        replace(DRAWN, top_k=1, n_logprobs=1),
        replace(GREEDY, repetition_penalty=1.4, history=history(likely[4][:20] * 3), n_logprobs=3),
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
def test_what_is_certain_is_as_on_the_cpu(dtype: torch.dtype) -> None:
    """Many steps, so that what the slots say changes what they say next."""
    first = normal(8).to(dtype)
    rows = certain_rows(first)
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


@on_device_only
def test_equal_weights_are_in_or_out_together_above_what_is_listed() -> None:
    """The 200th largest is one of 300 that are equal: all of them are kept."""
    logits = torch.zeros(VOCAB)
    logits[:100] = 9.0
    logits[5000:5300] = 8.0
    found = set(draws(logits, replace(DRAWN, top_k=200, temperature=8.0), 3000))
    assert found <= {*range(100), *range(5000, 5300)}
    assert max(found) >= 5200


def mixed_rows(n: int) -> list[RowSampling]:
    """Of all kinds, each with a seed of its own."""
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
    sick = logits.clone()
    sick[::2, 4097] = bad
    found, found_logprobs = sample(sick, rows)
    assert found == [-1 if i % 2 == 0 else token for i, token in enumerate(tokens)]
    assert found_logprobs == [None if i % 2 == 0 else each for i, each in enumerate(logprobs)]


def test_a_row_that_is_not_finite_says_nothing() -> None:
    """Its history is as before; a finite row's is not."""
    logits = torch.zeros(2, VOCAB)
    logits[:, 5], logits[:, 6] = 1.0, 0.9
    sick = logits.clone()
    sick[0, 9] = torch.nan
    rows = [replace(GREEDY, presence_penalty=0.5, history=history([1]))] * 2
    sampler = make(2)
    assert sample(sick, rows, sampler)[0] == [-1, 5]
    rows = [replace(row, history=None) for row in rows]
    assert sample(logits, rows, sampler)[0] == [5, 6]
    assert sample(logits, rows, sampler)[0] == [6, 5]


def test_a_slot_forgets_its_former_request() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 1.0, 0.9
    sampler = make(3)
    row = replace(GREEDY, presence_penalty=0.5, history=history([1], [5, 5]))
    assert sample(logits, [row], sampler, [2])[0] == [6]
    assert sample(logits, [replace(row, history=history([5], []))], sampler, [2])[0] == [5]
    assert sample(logits, [replace(GREEDY, logit_bias=((8, 5.0),))], sampler, [2])[0] == [8]
    assert sample(logits, [replace(GREEDY, logit_bias=((9, 5.0),))], sampler, [2])[0] == [9]
    with pytest.raises(DeviceError, match="no history"):
        sample(logits, [replace(row, history=None)], sampler, [2])


def test_more_rows_with_edits_than_are_edited_at_a_time() -> None:
    n = 300 if DEVICE == "cuda" else 130
    logits = torch.zeros(n, 200)
    rows = [replace(GREEDY, logit_bias=((i % 200, 1.0),)) for i in range(n)]
    assert sample(logits, rows)[0] == [i % 200 for i in range(n)]


def test_huge_logits_and_edits_are_drawn_from() -> None:
    """Edits beyond float32 leave numbers: the likeliest is drawn."""
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


def test_a_seed_gives_its_token_again_and_others_others() -> None:
    logits = torch.zeros(1, VOCAB)
    drawn = [
        replace(DRAWN, seed=seed, index=index) for seed in (0, 1, 1 << 40, (1 << 64) - 1) for index in range(5)
    ]
    tokens = sample(logits.expand(20, -1).contiguous(), drawn)[0]
    assert tokens == sample(logits.expand(20, -1).contiguous(), drawn)[0]
    assert Counter(tokens).most_common(1)[0][1] <= 2


def test_compiled_ahead_a_slot_is_as_new() -> None:
    sampler = make(1)
    sampler.warm_up(torch.float32)
    with pytest.raises(DeviceError, match="no history"):
        sample(normal(1), [replace(DRAWN, presence_penalty=1.0)], sampler)


@on_device_only
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
