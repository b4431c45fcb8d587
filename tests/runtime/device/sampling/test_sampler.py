"""Sampled tokens compared with plain torch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from radixkv.errors import DeviceError
from radixkv.runtime.device.sampling.cpu import Sampler
from radixkv.runtime.device.sampling.row_sampling import uniforms
from radixkv.runtime.step.plan import RowSampling
from support.cases import examples, rest_nightly
from support.sampler_oracle import (
    BIASES,
    DRAWN,
    GREEDY,
    PENALISED,
    VOCAB,
    N,
    check_logprobs,
    edited,
    history,
    normal,
    probabilities,
    sample,
    tokens_of,
)


@pytest.mark.parametrize(
    "row",
    rest_nightly(
        [
            DRAWN,
            replace(DRAWN, temperature=0.5),
            replace(DRAWN, temperature=3.0),
            replace(DRAWN, temperature=100.0),
            replace(DRAWN, top_k=5),
            replace(DRAWN, top_k=30),
            replace(DRAWN, top_k=1000),
            replace(DRAWN, top_p=0.7),
            replace(DRAWN, top_p=0.1, temperature=5.0),
            replace(DRAWN, min_p=0.1),
            replace(DRAWN, min_p=0.02, top_p=0.8),
            replace(DRAWN, temperature=1.5, top_k=8, top_p=0.9),
            replace(DRAWN, top_k=20, top_p=0.85, min_p=0.05),
            replace(DRAWN, logit_bias=BIASES, banned=(60, 61)),
            PENALISED,
            replace(PENALISED, temperature=0.8, top_k=12, top_p=0.9, min_p=0.02, logit_bias=BIASES, banned=(4,)),
            replace(PENALISED, repetition_penalty=0.7, frequency_penalty=-0.5, top_p=0.9),
        ],
        kept=(0, 1, 4, 7, 9, 13),
    ),
)
def test_token_frequencies_match_the_probabilities(row: RowSampling) -> None:
    logits = normal(VOCAB, seed=3)
    tokens = tokens_of(logits.expand(N, -1).contiguous(), [replace(row, seed=9, index=i) for i in range(N)])
    counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB).double()
    expected = probabilities(logits, row) * N
    assert (counts[expected == 0] == 0).all()
    rare = expected < 5
    chi_square = ((counts - expected)[~rare].square() / expected[~rare]).sum()
    if expected[rare].sum() > 5:
        chi_square += (counts[rare].sum() - expected[rare].sum()) ** 2 / expected[rare].sum()
    degrees = max(1, int((~rare).sum()))
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5


@st.composite
def rows(draw: st.DrawFn, vocab_size: int) -> RowSampling:
    tokens = st.integers(0, vocab_size - 1)
    share = st.floats(1e-3, 1.0)
    penalties = draw(st.booleans())
    prompt, answer = draw(st.lists(tokens, max_size=20)), draw(st.lists(tokens, max_size=20))
    return RowSampling(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 4.0])),
        top_k=draw(st.sampled_from([0, 1, 3, vocab_size, vocab_size + 7])),
        top_p=draw(st.just(1.0) | share),
        min_p=draw(st.just(0.0) | share),
        seed=draw(st.integers(0, 99)),
        index=0,
        presence_penalty=draw(st.floats(-2.0, 2.0)) if penalties else 0.0,
        frequency_penalty=draw(st.floats(-2.0, 2.0)) if penalties else 0.0,
        repetition_penalty=draw(st.floats(0.5, 2.0)) if penalties else 1.0,
        history=history(prompt, answer) if penalties else None,
        logit_bias=tuple(draw(st.dictionaries(tokens, st.floats(-100.0, 100.0), max_size=5)).items()),
        banned=tuple(draw(st.lists(tokens, max_size=min(3, vocab_size - 1)))),
        n_logprobs=draw(st.sampled_from([None, 0, 2, 20])),
    )


@examples(60)
@given(st.data())
def test_sampled_tokens_are_possible(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([1, 2, 63, 64, 130, 700]))
    settings_of_rows = data.draw(st.lists(rows(vocab_size), min_size=1, max_size=4))
    # Rounded to tenths, so that equal logits are common.
    logits = (normal(len(settings_of_rows), vocab_size, seed=data.draw(st.integers(0, 99))) * 10).round() / 10
    for index in range(5):
        sampling = [replace(row, index=index) for row in settings_of_rows]
        for choice, row, values in zip(sample(logits, sampling), sampling, logits, strict=True):
            changed = edited(values, row)
            if row.temperature == 0.0 or row.top_k == 1:
                assert changed[choice.token] >= changed.max() - 1e-4
            else:
                # Rounding may put a token at the edge of a cutoff on either side; equal logits are cut together.
                wider = probabilities(values, replace(row, top_p=min(1.0, row.top_p + 1e-4), top_k=0))
                minimum = changed.sort(descending=True).values[min(row.top_k or vocab_size, vocab_size) - 1]
                assert changed[choice.token] >= minimum - 1e-4
                assert (
                    row.top_k or wider[choice.token] > 0 or changed[choice.token] >= changed[wider > 0].min() - 1e-4
                )
            check_logprobs(choice.logprobs, values, choice.token, row.n_logprobs)


def test_a_row_is_bitwise_independent_of_other_rows() -> None:
    logits = normal(64, 501, seed=4, scale=1.0)
    kinds = [
        GREEDY,
        DRAWN,
        replace(DRAWN, top_k=7, n_logprobs=3),
        replace(DRAWN, temperature=0.7, top_p=0.8),
        replace(DRAWN, temperature=1.3, top_k=20, top_p=0.95, min_p=0.1),
        replace(DRAWN, top_k=1, logit_bias=BIASES),
        replace(PENALISED, n_logprobs=0),
        replace(PENALISED, top_k=300, top_p=0.3, temperature=2.0),
    ]
    sampling = [replace(kinds[i % len(kinds)], seed=i * 31, index=i % 5) for i in range(64)]
    together = sample(logits, sampling)
    for i in range(64):
        assert sample(logits[i : i + 1], sampling[i : i + 1]) == together[i : i + 1]
        shifted = torch.empty(502)[1:].copy_(logits[i])
        assert sample(shifted[None], sampling[i : i + 1]) == together[i : i + 1]
    assert sample(logits[17:40], sampling[17:40]) == together[17:40]
    assert sample(logits.flip(0), sampling[::-1])[::-1] == together


def test_rows_with_many_candidates_beside_rows_with_few() -> None:
    """All equal logits are candidates; the chosen token need not be among the top logprobs."""
    logits = normal(9, 3000, seed=4)
    logits[2] = logits[7] = 0.5
    logits[4] += 100.0
    logits[5] = -0.1 - logits[5].abs()
    logits[5, :40] = torch.tensor([-0.0, 0.0]).repeat(20)
    lifted = tuple((token, 12.0) for token in range(100, 130))
    sampling = [
        replace(DRAWN, top_k=2000 if i == 6 else 20, top_p=0.9, logit_bias=lifted * (i % 2), seed=i, n_logprobs=9)
        for i in range(9)
    ]
    together = sample(logits, sampling)
    for i, choice in enumerate(together):
        assert [choice] == sample(logits[i : i + 1], sampling[i : i + 1])
        assert probabilities(logits[i], replace(sampling[i], top_p=0.91))[choice.token] > 0
        check_logprobs(choice.logprobs, logits[i], choice.token, 9)


def test_the_draw_depends_on_seed_and_index() -> None:
    """Of 128 equal logits, the token is the random number's place among them."""
    seeds = [seed for seed in (0, 1, 2, (1 << 63) - 1, (1 << 64) - 1) for _ in range(100)]
    sampling = [replace(DRAWN, top_k=128, seed=seed, index=i % 100) for i, seed in enumerate(seeds)]
    draws = [uniforms(row.seed, row.index)[0] for row in sampling]
    assert tokens_of(torch.zeros(500, VOCAB), sampling) == [int(128 * draw) for draw in draws]
    assert len(set(draws)) == 500
    assert all(0 <= draw < 1 for draw in draws)
    assert abs(sum(draws) / 500 - 0.5) < 0.05


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0), 0, (0x6627E8D5, 0xE169C58D)),
    ],
)
def test_the_random_numbers_are_those_of_philox(counter: tuple[int, int], key: int, words: tuple[int, int]) -> None:
    """The first two words of Random123's known answers for Philox4x32-10."""
    expected = [(word if word < 1 << 31 else (1 << 32) - 1 - word) / (1 << 31) for word in words]
    assert uniforms(key, *counter) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("row", [GREEDY, replace(DRAWN, top_k=9, temperature=0.9, n_logprobs=4)])
def test_penalties_over_many_steps(row: RowSampling) -> None:
    """Each batch slot counts its own tokens; a request restarted with its history gives the same tokens."""
    prompts = [[1, 2, 3], list(range(100)), []]
    sampling = [
        replace(row, frequency_penalty=0.7, seed=1),
        replace(row, repetition_penalty=1.8, presence_penalty=-0.4, seed=2, logit_bias=BIASES),
        replace(row, presence_penalty=1.1, repetition_penalty=0.9, seed=3),
    ]
    first = [replace(one, history=history(prompt)) for one, prompt in zip(sampling, prompts, strict=True)]
    sampler, answers = Sampler(3, VOCAB), [list[int](), list[int](), list[int]()]
    # In every third step all logits are negative, so the repetition penalty multiplies.
    steps = [(normal(VOCAB, seed=i, scale=1.0) - 6 * (i % 3 == 0)).expand(3, -1).contiguous() for i in range(60)]
    for step, logits in enumerate(steps):
        step_sampling = [replace(one, index=step) for one in (sampling if step else first)]
        with_history = [
            replace(one, history=history(prompt, answer))
            for one, prompt, answer in zip(step_sampling, prompts, answers, strict=True)
        ]
        got = sample(logits, step_sampling, sampler)
        assert got == sample(logits, with_history)
        for choice, answer, row_with_history in zip(got, answers, with_history, strict=True):
            answer.append(choice.token)
            if row.temperature == 0.0:
                assert choice.token == int(edited(logits[0], row_with_history).argmax())
    assert answers[0] != answers[1] != answers[2]


def test_a_batch_slot_drops_the_state_of_its_last_request() -> None:
    logits = normal(1, VOCAB, seed=7)
    best = int(logits.argmax())
    penalised = replace(GREEDY, presence_penalty=2.0, repetition_penalty=2.0)
    sampler = Sampler(1, VOCAB)
    assert tokens_of(logits, [replace(penalised, history=history([best]))], sampler) != [best]
    assert tokens_of(logits, [GREEDY], sampler) == [best]
    with pytest.raises(DeviceError, match="slot 0 has penalties and no history"):
        tokens_of(logits, [penalised], sampler)
    assert tokens_of(logits, [replace(penalised, history=history([]))], sampler) == [best]
    assert tokens_of(logits, [penalised], sampler) != [best]
    assert tokens_of(logits, [replace(penalised, history=history([]))], sampler) == [best]
    assert tokens_of(logits, [replace(GREEDY, logit_bias=((0, 1.0),))], sampler) == [best]


def test_biases_and_bans_may_change_between_steps() -> None:
    logits = normal(1, VOCAB, seed=7)
    order = logits[0].argsort(descending=True).tolist()
    sampler = Sampler(1, VOCAB)
    biased = replace(GREEDY, logit_bias=((150, 100.0),))
    assert tokens_of(logits, [replace(biased, banned=(150, order[0]))], sampler) == [order[1]]
    assert tokens_of(logits, [replace(biased, banned=(order[0],))], sampler) == [150]
    assert tokens_of(logits, [biased], sampler) == [150]
    assert tokens_of(logits, [replace(biased, logit_bias=((order[0], -100.0),))], sampler) == [order[1]]
    assert tokens_of(logits, [GREEDY], sampler) == [order[0]]
