"""A mask does what a ban of all other tokens does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from radixkv.runtime.device.sampling.cpu import Sampler
from radixkv.runtime.step.plan import RowSampling
from support.cases import examples
from support.sampler_oracle import DRAWN, GREEDY, history, normal
from support.token_bits import masks_of

PENALISED = replace(DRAWN, repetition_penalty=1.7, frequency_penalty=0.4, history=history([0, 1, 2], [1, 2, 2]))
KINDS = (
    GREEDY,
    DRAWN,
    PENALISED,
    replace(DRAWN, top_k=3, top_p=0.8, n_logprobs=2),
    replace(DRAWN, temperature=0.3, min_p=0.1, logit_bias=((0, 9.0), (2, -4.0))),
    replace(GREEDY, logit_bias=((1, 30.0),), n_logprobs=1),
)


@examples(150)
@given(st.data())
def test_a_mask_is_a_ban_of_all_other_tokens(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from((3, 31, 32, 33, 64, 700)))
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))
    logits = normal(len(kinds), vocab_size, seed=data.draw(st.integers(0, 99)))
    masked: list[RowSampling] = []
    banned: list[RowSampling] = []
    allowed: list[set[int] | None] = []
    for index, kind in enumerate(kinds):
        row = replace(kind, seed=index)
        tokens = data.draw(st.none() | st.sets(st.integers(0, vocab_size - 1), min_size=1))
        allowed.append(tokens)
        masked.append(replace(row, is_masked=tokens is not None))
        others = () if tokens is None else tuple(sorted(set(range(vocab_size)) - tokens))
        banned.append(replace(row, banned=others))
    masks = masks_of(allowed, vocab_size)
    by_row = dict(zip(masks.positions, masks.bits, strict=True))
    got = Sampler(*logits.shape).sample(
        logits.clone(), range(len(kinds)), masked, [by_row.get(row) for row in range(len(kinds))]
    )
    assert got == Sampler(*logits.shape).sample(logits, range(len(kinds)), banned)


def test_a_masked_row_without_a_mask_samples_from_all_tokens() -> None:
    logits = normal(3, 64)
    rows = [GREEDY, DRAWN, PENALISED]
    masked = [replace(row, is_masked=True) for row in rows]
    expected = Sampler(3, 64).sample(logits.clone(), range(3), rows)
    assert Sampler(3, 64).sample(logits.clone(), range(3), masked) == expected
    assert Sampler(3, 64).sample(logits.clone(), range(3), masked, [None] * 3) == expected
