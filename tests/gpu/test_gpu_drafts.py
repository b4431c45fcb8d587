"""Rows with drafts on CUDA: answers, logprobs and draws are those of one token a step, within bf16's noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from gpu_drive import executor_of, loop_of, record
from gpu_support import (
    NEAR_TIE,
    VOCAB,
    check_same_answers,
    common_difference,
    engine_scores,
    family,
    greedy,
    opened,
    random_ids,
)
from test_gpu_not_finite import poison_between_steps, pool_of

from radixkv import LLM, RequestOutput, SamplingParams
from radixkv.runtime.protocols.drafts import Drafts
from radixkv.runtime.request import Request
from radixkv.runtime.step.plan import Row, RowSampling, StepPlan
from radixkv.runtime.step.result import TokenMasks
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.messages import pack_tokens, unpack_tokens

N_NEW = 48
N_DRAFTS = 5
DRAFTS: dict[str, Any] = {"speculative_config": {"method": "ngram"}}
"""Opens the device for drafts; the tests put their own in place of these."""


@dataclass
class KnownAnswers(Drafts):
    """Drafts what was answered before; every sixth draft is wrong."""

    answers: dict[bytes, bytes]
    """Answer by prompt."""
    is_on: bool = True
    counts: list[int] = field(default_factory=list)
    """Accepted drafts of each row."""

    def wants_results(self, *, has_prompts: bool) -> bool:
        return self.is_on

    def draft(self, requests: Sequence[Request], max_drafts: Sequence[int], n_most: int) -> list[bytes]:
        found = []
        for request, max_of_row in zip(requests, max_drafts, strict=True):
            n_prompt_bytes = request.n_prompt * TOKEN_BYTES
            answer = self.answers.get(bytes(request.known_key[:n_prompt_bytes]), b"")
            done = len(request.known_key) - n_prompt_bytes
            tokens = unpack_tokens(answer[done : done + TOKEN_BYTES * max(0, min(N_DRAFTS, max_of_row, n_most))])
            n_most -= len(tokens)
            first = request.n_outputs
            found.append(pack_tokens([token + ((first + n) % 6 == 0) for n, token in enumerate(tokens)]))
        return found

    def verified(self, request: Request, n_drafts: int, n_accepted: int) -> None:
        self.counts.append(n_accepted)


def drafting(llm: LLM, outputs: Sequence[RequestOutput]) -> KnownAnswers:
    """Lets the engine draft the answers that it has given; the cache is as cold as before them."""
    llm.flush_cache()
    known = {pack_tokens(one.prompt_token_ids): pack_tokens(one.outputs[0].token_ids) for one in outputs}
    loop_of(llm).scheduler.drafts = drafts = KnownAnswers(known)
    return drafts


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True},
        {"attention_backend": "triton"},
        {"kv_cache_dtype": "fp8"},
        {"max_num_batched_tokens": 96},
    ],
)
def test_answers_with_drafts(sensitive_folder: Path, settings: dict[str, Any]) -> None:
    """Few rows and many, with shared prefixes and long contexts, cold and then with hits."""
    prompts = [*family(6, seed=1), random_ids(3500, seed=2), random_ids(900, seed=3)]
    tolerance = 2 * NEAR_TIE if "kv_cache_dtype" in settings else NEAR_TIE
    with opened(sensitive_folder, **DRAFTS, **settings) as llm:
        plans = record(llm)
        expected = llm.generate(prompts, greedy(N_NEW, logprobs=20), use_tqdm=False)
        n_steps = len(plans)
        drafts = drafting(llm, expected)
        plans.clear()
        for _ in range(2):
            found = llm.generate(prompts, greedy(N_NEW, logprobs=20), use_tqdm=False)
            check_same_answers(expected, tokens_of(found), tolerance=tolerance)
            check_same_answers(found, tokens_of(expected), tolerance=tolerance)
            assert all(len(output.outputs[0].logprobs or ()) == N_NEW for output in found)
        # After the first near-tie that goes the other way, the drafts are of another answer.
        assert sum(drafts.counts) > len(drafts.counts), "few drafts are accepted"
        assert max(drafts.counts) == N_DRAFTS
        assert any(len(plan.rows) > 1 and plan.n_drafts for plan in plans)
        assert len(plans) < 1.8 * n_steps, "two runs with drafts take about as many steps as two without"
        loop_of(llm).check()


def test_drafts_beside_rows_without(sensitive_folder: Path) -> None:
    """Greedy rows with biases, penalties, ``min_tokens`` and prompt logprobs beside rows with drafts."""
    prompts = family(12, seed=4)
    params = [
        [
            greedy(N_NEW, logprobs=5),
            greedy(N_NEW, logprobs=20, logit_bias={7: 3.0}),
            greedy(N_NEW, logprobs=20, frequency_penalty=0.4),
            greedy(N_NEW, logprobs=20, min_tokens=20, prompt_logprobs=1),
        ][index % 4]
        for index in range(len(prompts))
    ]
    with opened(sensitive_folder, **DRAFTS) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
        drafts = drafting(llm, expected)
        found = llm.generate(prompts, params, use_tqdm=False)
        check_same_answers(expected, tokens_of(found), tolerance=NEAR_TIE, min_share=0.5)
        assert sum(drafts.counts) > len(drafts.counts) / 2


def test_draws_are_those_of_one_token_a_step(sensitive_folder: Path) -> None:
    """Sampled answers with drafts stay as long on the way of those without as requests alone do.

    With few likely tokens, noise seldom changes a draw.
    """
    prompts = family(32, seed=5)
    params = [SamplingParams(temperature=0.2, max_tokens=N_NEW, seed=n, logprobs=1) for n in range(32)]
    with opened(sensitive_folder, **DRAFTS, enable_prefix_caching=False) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        one_by_one = zip(prompts, params, strict=True)
        alone = [llm.generate([prompt], one, use_tqdm=False)[0] for prompt, one in one_by_one]
        drafts = drafting(llm, together)
        found = llm.generate(prompts, params, use_tqdm=False)
    assert max(drafts.counts) == N_DRAFTS
    expected = sum(map(common_length, together, alone)) / len(prompts)
    assert expected > N_NEW / 4, "noise hides what is compared"
    assert sum(map(common_length, together, found)) / len(prompts) > 0.75 * expected


def test_logprobs_differ_no_more_than_those_of_another_batch_do(sensitive_folder: Path) -> None:
    prompts = family(24, seed=6)
    sampling = greedy(12, logprobs=20)
    with opened(sensitive_folder, **DRAFTS, enable_prefix_caching=False) as llm:
        expected = llm.generate(prompts, sampling, use_tqdm=False)
        alone = [llm.generate([prompt], sampling, use_tqdm=False)[0] for prompt in prompts]
        drafts = drafting(llm, expected)
        found = llm.generate(prompts, sampling, use_tqdm=False)
    assert max(drafts.counts) == N_DRAFTS

    def differences(others: Sequence[RequestOutput]) -> list[float]:
        return [
            common_difference(engine_scores(a)[1], engine_scores(b)[1])
            for a, b in zip(expected, others, strict=True)
            if common_length(a, b) == 12
        ]

    noise, with_drafts = differences(alone), differences(found)
    assert min(len(noise), len(with_drafts)) >= 6, "few answers are equal"
    assert max(with_drafts) <= 1.5 * max(noise)


def common_length(one: RequestOutput, other: RequestOutput) -> int:
    """Returns how many of the first tokens of two answers are equal."""
    pairs = zip(one.outputs[0].token_ids, other.outputs[0].token_ids, strict=True)
    return next(
        (index for index, (mine, theirs) in enumerate(pairs) if mine != theirs), len(one.outputs[0].token_ids)
    )


def test_texts_that_repeat_themselves_are_drafted(sensitive_folder: Path) -> None:
    """The engine's own drafts: a bias makes answers repeat three tokens, so that guesses are mostly right."""
    params = greedy(400, logit_bias={7: 90.0})
    config = {"method": "ngram", "num_speculative_tokens": 8}
    prompts = [[*random_ids(40, seed=n), *[7] * 12] for n in range(4)]
    with opened(sensitive_folder) as plain, opened(sensitive_folder, speculative_config=config) as llm:
        steps = []
        for engine in (plain, llm):
            before = engine.get_metrics().steps_total
            assert all(set(output.outputs[0].token_ids) == {7} for output in engine.generate(prompts, params))
            steps.append(engine.get_metrics().steps_total - before)
        assert steps[1] < steps[0] // 2
        loop_of(llm).check()


def test_each_position_has_its_mask(sensitive_folder: Path) -> None:
    """A masked row with drafts beside one without masks and a masked one without drafts."""
    rng = Random(7)
    prompts = [random_ids(40, seed=n) for n in range(3)]
    allowed = [[rng.randrange(VOCAB) for _ in range(3)] for _ in range(4 + 1)]
    free = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, index=0)
    masked = msgspec.structs.replace(free, is_masked=True)
    bits = np.zeros((len(allowed), -(-VOCAB // 32)), np.int32)
    for mask, tokens in zip(bits.view(np.uint32), allowed, strict=True):
        for token in tokens:
            mask[token // 32] |= np.uint32(1 << token % 32)
    with opened(sensitive_folder, **DRAFTS) as llm:
        executor = executor_of(llm)

        def row(slot: int, start: int, tokens: list[int], sampling: RowSampling | None, **more: Any) -> Row:
            pages = tuple(range(10 * slot, 10 * slot + 10)) if start == 0 else ()
            return Row(slot, start, len(tokens), pack_tokens(tokens), start, 0, pages, sampling, **more)

        prefill = tuple(row(slot, 0, prompt, None) for slot, prompt in enumerate(prompts))
        executor.launch(StepPlan(0, prefill)).sample(None).result()
        drafting = [
            row(0, 40, [5, 6, 7], free, n_drafts=2),
            row(1, 40, [5, 6, 7, 8], masked, n_drafts=3),
            row(2, 40, [5], masked),
        ]
        plan = StepPlan(1, tuple(drafting), is_masked=True, n_decode=3, n_drafts=5)
        result = executor.launch(plan).sample(TokenMasks((3, 4, 5, 6, 7), bits)).result()
        unmasked = msgspec.structs.replace(drafting[0])
        alone = executor.launch(StepPlan(2, (unmasked,), n_decode=1, n_drafts=2)).sample(None).result()
    assert all(result.finite)
    assert all(token in tokens for token, tokens in zip(result.tokens[3:], allowed, strict=True))
    assert result.tokens[:3] == alone.tokens


def test_a_page_with_nan_changes_no_answer_with_drafts(sensitive_folder: Path) -> None:
    """The rows that read it are computed again without the cache; the others keep their drafts."""
    stem = random_ids(160, seed=1)
    prompts = [stem + random_ids(5 + n, seed=10 + n) for n in range(3)]
    prompts += [random_ids(50 + 30 * n, seed=100 + n) for n in range(3)]
    with opened(sensitive_folder, **DRAFTS) as llm:
        expected = llm.generate(prompts, greedy(N_NEW, logprobs=20), use_tqdm=False)
        drafts, plans = drafting(llm, expected), record(llm)
        llm.generate([stem + random_ids(20, seed=2)], greedy(2), use_tqdm=False)
        poison_between_steps(pool_of(llm), [plans[0].rows[0].table_pages[3]])
        found = llm.generate(prompts, greedy(N_NEW, logprobs=20), use_tqdm=False)
        check_same_answers(expected, tokens_of(found), tolerance=NEAR_TIE)
        assert max(drafts.counts) == N_DRAFTS
        loop_of(llm).check()
