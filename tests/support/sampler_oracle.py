"""The sampler's oracle: logit edits and probabilities in plain torch, one row at a time."""

from array import array
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from radixkv.runtime.device.sampling.cpu import SampledToken, Sampler
from radixkv.runtime.device.sampling.logit_edits import has_edits
from radixkv.runtime.step.plan import History, RowSampling
from radixkv.wire.messages import TokenLogprobs, unpack_tokens

N = 2000
VOCAB = 200
"""Not a multiple of the sampler's block sizes."""

DRAWN = RowSampling(temperature=1.0, top_k=0, top_p=1.0, seed=0, index=0)
GREEDY = replace(DRAWN, temperature=0.0)
BIASES = ((3, 4.0), (17, -100.0), (199, 5.5), (60, 1.5))


def history(prompt: Sequence[int], answer: Sequence[int] = ()) -> History:
    return History(array("i", [*prompt, *answer]).tobytes(), len(prompt))


def normal(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def sample(
    logits: Tensor, rows: Sequence[RowSampling], sampler: Sampler | None = None
) -> list[SampledToken | None]:
    """Samples one step with one batch slot per row; checks that logits without edits are unchanged."""
    sampler = sampler or Sampler(*logits.shape)
    given = logits.clone()
    sampled = sampler.sample(given, range(len(logits)), rows)
    plain = [index for index, row in enumerate(rows) if not has_edits(row)]
    assert torch.equal(logits[plain].view(torch.int32), given[plain].view(torch.int32))
    return sampled


def tokens_of(logits: Tensor, rows: Sequence[RowSampling], sampler: Sampler | None = None) -> list[int]:
    return [-1 if choice is None else choice.token for choice in sample(logits, rows, sampler)]


def edited(logits: Tensor, row: RowSampling) -> Tensor:
    """Returns the logits after bias, bans and penalties, computed directly, [vocab] float64.

    A row with penalties must have its history.
    """
    changed = logits.double().clone()
    for token, bias in row.logit_bias:
        changed[token] += bias
    changed[list(row.banned)] = -torch.inf
    if row.history is not None:
        ids = torch.tensor(unpack_tokens(row.history.tokens), dtype=torch.int64)
        counts = torch.bincount(ids[row.history.n_prompt :], minlength=len(changed))
        seen = torch.bincount(ids, minlength=len(changed)) > 0
        scaled = torch.where(changed > 0, changed / row.repetition_penalty, changed * row.repetition_penalty)
        changed = torch.where(seen, scaled, changed)
        changed -= row.frequency_penalty * counts
        changed -= row.presence_penalty * (counts > 0)
    return changed


def probabilities(logits: Tensor, row: RowSampling) -> Tensor:
    """Returns the probabilities, [vocab] float64: edits, softmax, then each cutoff and renormalisation."""
    result = (edited(logits, row) / row.temperature).softmax(-1)
    result[result < row.min_p * result.max() * (1 - 1e-6)] = 0.0
    ordered, order = result.sort(descending=True, stable=True)
    if row.top_k:
        ordered[row.top_k :] = 0.0
    ordered /= ordered.sum()
    ordered[ordered.cumsum(0) - ordered >= row.top_p] = 0.0
    result = torch.zeros_like(result)
    result[order] = ordered / ordered.sum()
    return result


PENALISED = replace(
    DRAWN,
    repetition_penalty=1.4,
    frequency_penalty=0.3,
    presence_penalty=0.5,
    history=history(range(0, 200, 3), [5, 5, 5, 8, 12]),
)


def check_logprobs(got: TokenLogprobs | None, logits: Tensor, token: int, n: int | None) -> None:
    if n is None:
        assert got is None
        return
    assert got is not None
    expected = logits.double().log_softmax(-1)
    order = expected.sort(descending=True, stable=True).indices[:n]
    assert got.logprob == pytest.approx(float(expected[token]), abs=2e-5)
    assert got.rank == 1 + int((logits > logits[token]).sum())
    assert np.frombuffer(got.top_ids, "<i4").tolist() == order.tolist()
    assert np.frombuffer(got.top_logprobs, "<f4") == pytest.approx(expected[order].numpy(), abs=2e-5)
