"""Comparison of a GPU's answers with those of the CPU, and of the bits of two runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from gpu_support import Scores, deviation, engine_scores, greedy, opened, sequence_of

from radixkv import LLM, SamplingParams
from radixkv.llm.outputs import RequestOutput
from radixkv.wire.stats import Stats

N_TOP = 8


def check_scores(
    name: str, outputs: Sequence[RequestOutput], folder: Path, noise: float, *, min_share: float = 0.9
) -> None:
    """Compares log-probabilities of prompts and answers with the CPU's in float32, teacher-forced.

    Args:
        name: for what is printed.
        outputs: with the likeliest 20 of all tokens.
        folder: of the checkpoint.
        noise: allowed distance, as a multiple of that of the CPU's own bfloat16.
        min_share: of the CPU's likeliest tokens that must be among those of the outputs.
    """
    sequences = [sequence_of(output) for output in outputs]
    exact, rounded = (cpu_scores(folder, sequences, dtype) for dtype in ("float32", "bfloat16"))
    for part, where in enumerate(("prompts", "answers")):
        ours: list[float] = []
        theirs: list[float] = []
        n_wanted = 0
        for output, expected, near in zip(outputs, exact, rounded, strict=True):
            found = engine_scores(output)[part]
            positions = {position for position, _ in found}
            # Chosen by the exact scores: ours would favour tokens that our own noise has raised.
            wanted = [key for key in top_of(expected) if key[0] in positions]
            n_wanted += len(wanted)
            ours += [found[key] - expected[key] for key in wanted if key in found]
            theirs += [near[key] - expected[key] for key in wanted if key in near]
        print(
            f"{name} {where}: off by {deviation(ours):.5f} (CPU in bfloat16 {deviation(theirs):.5f}), "
            f"at most {max(map(abs, ours)):.4f} ({max(map(abs, theirs)):.4f}); {len(ours)} of {n_wanted} scores"
        )
        assert len(ours) > min_share * n_wanted, "the likeliest tokens are not among those reported"
        assert deviation(ours) <= noise * deviation(theirs)
        assert max(map(abs, ours)) <= 2.5 * noise * max(map(abs, theirs))


def cpu_scores(folder: Path, sequences: Sequence[Sequence[int]], dtype: str) -> list[Scores]:
    """Returns log-probabilities of the likeliest tokens at each position but the first."""
    with opened(folder, device="cpu", dtype=dtype, enable_prefix_caching=False, max_num_seqs=4) as llm:
        outputs = llm.generate([list(one) for one in sequences], greedy(1, prompt_logprobs=20), use_tqdm=False)
    return [engine_scores(output)[0] for output in outputs]


def top_of(scores: Scores) -> list[tuple[int, int]]:
    """Returns position and token of the likeliest tokens of each position."""
    by_position: dict[int, list[tuple[float, int]]] = {}
    for (position, token), score in scores.items():
        by_position.setdefault(position, []).append((score, token))
    return [(position, token) for position, found in by_position.items() for _, token in sorted(found)[-N_TOP:]]


def bits(output: RequestOutput) -> list[dict[int, float]]:
    """Returns all log-probabilities of an answer."""
    (answer,) = output.outputs
    assert answer.logprobs is not None
    return [{token: one.logprob for token, one in position.items()} for position in answer.logprobs]


def check_same_bits(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Checks that all log-probabilities of answers are equal."""
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        difference = max(
            abs(mine.get(token, -99.0) - score)
            for mine, theirs in zip(bits(one), bits(other), strict=True)
            for token, score in theirs.items()
        )
        assert bits(one) == bits(other), f"prompt {index}: log-probabilities differ by {difference}"


def check_hits(
    opened: Callable[..., AbstractContextManager[LLM]],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    n_found_first: int,
    n_found_again: int,
) -> Stats:
    """Checks that prompts have the bits of cold ones, when they are sent one after the other, and then again.

    All together find at least ``n_found_first`` tokens at first, and each ``n_found_again`` then. ``opened`` opens
    the model with more settings. Returns what the engine has counted.
    """

    def answers(llm: LLM) -> list[RequestOutput]:
        return [llm.generate([list(prompt)], params, use_tqdm=False)[0] for prompt in prompts]

    with opened(enable_prefix_caching=False) as llm:
        cold = answers(llm)
    with opened() as llm:
        first, again = answers(llm), answers(llm)
        stats = llm.get_metrics()
    n_first, n_again = ([one.num_cached_tokens or 0 for one in found] for found in (first, again))
    print("cached tokens", n_first, n_again)
    assert sum(n_first) >= n_found_first
    assert min(n_again) >= n_found_again
    for found in (first, again):
        check_same_bits(found, cold)
    return stats


def first_difference(one: RequestOutput, other: RequestOutput) -> int:
    """Returns how many tokens two answers have in common."""
    pairs = zip(one.outputs[0].token_ids, other.outputs[0].token_ids, strict=True)
    differing = [index for index, (mine, theirs) in enumerate(pairs) if mine != theirs]
    return differing[0] if differing else len(one.outputs[0].token_ids)
