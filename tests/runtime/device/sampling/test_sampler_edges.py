"""Edge cases of the sampler: ties, extreme settings, rows that are not finite, invalid token ids."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from radixkv.errors import DeviceError
from radixkv.runtime.device.sampling.cpu import Sampler
from radixkv.runtime.step.plan import RowSampling
from support.sampler_oracle import (
    DRAWN,
    GREEDY,
    PENALISED,
    VOCAB,
    check_logprobs,
    history,
    normal,
    sample,
    tokens_of,
)


def test_all_tokens_but_one_are_banned() -> None:
    logits = normal(1, VOCAB, seed=8)
    everything_else = tuple(token for token in range(VOCAB) if token != 77)
    for row in (GREEDY, DRAWN, replace(DRAWN, top_k=5), replace(DRAWN, top_p=0.5), replace(DRAWN, min_p=1.0)):
        assert tokens_of(logits, [replace(row, banned=everything_else, n_logprobs=2)]) == [77]


def test_all_tokens_are_banned() -> None:
    with pytest.raises(DeviceError, match="all 200 tokens are banned"):
        tokens_of(normal(1, VOCAB), [replace(GREEDY, banned=tuple(range(VOCAB)))])


def test_greedy_takes_the_smallest_id_of_equal_logits() -> None:
    logits = torch.zeros(3, 300)
    logits[1, 140] = logits[1, 260] = 1.0
    assert tokens_of(logits, [GREEDY, replace(DRAWN, top_k=1), GREEDY]) == [0, 140, 0]
    assert {tokens_of(logits[:1], [replace(DRAWN, top_k=4, seed=seed)])[0] for seed in range(60)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "row",
    [
        replace(DRAWN, temperature=1e-5),
        replace(DRAWN, temperature=1e-30),
        replace(DRAWN, temperature=5e-324),
        replace(DRAWN, temperature=100.0, min_p=1.0),
        replace(DRAWN, top_p=5e-324),
        replace(DRAWN, top_p=1e-6, temperature=100.0),
        replace(DRAWN, top_p=1e-6, top_k=50),
    ],
)
def test_extreme_settings_take_the_likeliest(row: RowSampling) -> None:
    logits = normal(20, 300, seed=5)
    assert tokens_of(logits, [replace(row, seed=i) for i in range(20)]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("penalty", [5e-324, 1e-30, 100.0])
def test_extreme_penalties(penalty: float) -> None:
    logits = normal(1, VOCAB, seed=8)
    best, worst = int(logits.argmax()), int(logits.argmin())
    row = replace(DRAWN, repetition_penalty=penalty, history=history([best, worst, *range(9)], [best]))
    for one in (row, replace(row, top_k=1), replace(row, temperature=0.0), replace(row, top_p=0.2)):
        assert (tokens_of(logits, [one]) == [best]) == (penalty < 1)


def test_large_logits() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, 3e38]])
    assert {tokens_of(logits, [replace(DRAWN, seed=seed)])[0] for seed in range(30)} == {0, 3}
    assert {tokens_of(logits, [replace(DRAWN, seed=seed, top_k=3)])[0] for seed in range(30)} == {0, 3}


@pytest.mark.parametrize(
    "row", [DRAWN, replace(DRAWN, top_k=5), replace(DRAWN, top_p=0.9), replace(DRAWN, min_p=0.1, top_p=0.9)]
)
@pytest.mark.parametrize(("penalty", "seen"), [(1e-30, [7]), (100.0, range(VOCAB))])
def test_penalties_that_overflow_float32(row: RowSampling, penalty: float, seen: Sequence[int]) -> None:
    """The largest logit or all logits become infinite; a draw by rejection would not terminate."""
    logits = -normal(1, VOCAB, seed=8).abs() * 1e37 - 1e37
    logits[0, 7] = 1e37 if penalty < 1 else logits[0, 7]
    sampling = replace(row, repetition_penalty=penalty, history=history(seen))
    (token,) = tokens_of(logits, [sampling])
    assert token == 7 if penalty < 1 else 0 <= token < VOCAB


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("index", [0, 99, 199])
def test_a_row_that_is_not_finite_beside_good_ones(wrong: float, index: int) -> None:
    kinds = [GREEDY, DRAWN, replace(DRAWN, top_k=3), replace(DRAWN, top_p=0.5, n_logprobs=1), PENALISED]
    logits = normal(2 * len(kinds), VOCAB, seed=6)
    expected = sample(logits, kinds * 2)
    logits[: len(kinds), index] = wrong
    assert sample(logits, kinds * 2) == [None] * len(kinds) + expected[len(kinds) :]


def test_a_batch_slot_keeps_its_counts_after_a_row_that_is_not_finite() -> None:
    logits, sampler = normal(1, VOCAB, seed=7), Sampler(1, VOCAB)
    penalised = replace(GREEDY, presence_penalty=2.0)
    broken = logits.clone()
    broken[0, 5] = torch.nan
    assert sample(broken, [replace(penalised, history=history([], [int(logits.argmax())]))], sampler) == [None]
    assert tokens_of(logits, [penalised], sampler) == [int(logits[0].argsort(descending=True)[1])]


def test_logprobs_of_given_tokens() -> None:
    logits = (normal(50, 700, seed=9) * 3).round() / 3
    targets = np.array([i * 13 for i in range(50)], dtype=np.int32)
    for n in (0, 1, 20, 1000):
        logprobs = Sampler(1, 700).score(logits, targets, n)
        assert logprobs is not None
        for token_logprobs, values, target in zip(logprobs, logits, targets.tolist(), strict=True):
            check_logprobs(token_logprobs, values, target, n)


def test_logprobs_of_invalid_tokens_or_logits() -> None:
    sampler, logits = Sampler(1, 20), normal(2, 20)
    for target in (-1, 20):
        with pytest.raises(DeviceError, match=f"not between 0 and 19 .*{target}"):
            sampler.score(logits, np.array([3, target]), 1)
    assert sampler.score(logits[:0], np.array([], dtype=np.int32), 1) == []
    logits[1, 4] = -torch.inf
    assert sampler.score(logits, np.array([3, 3]), 1) is None


@pytest.mark.parametrize(
    "row",
    [
        replace(GREEDY, banned=(20,)),
        replace(GREEDY, logit_bias=((-1, 1.0),)),
        replace(GREEDY, presence_penalty=1.0, history=history([1, 20])),
        replace(GREEDY, presence_penalty=1.0, history=history([-1])),
    ],
)
def test_token_ids_outside_the_vocabulary(row: RowSampling) -> None:
    with pytest.raises(DeviceError, match="not all between 0 and 19"):
        Sampler(1, 20).sample(normal(1, 20), [0], [row])
