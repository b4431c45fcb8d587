"""Overlapping steps on CUDA: a step never reads what the next one has overwritten."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

from gpu_drive import Drive, executor_of, record
from gpu_support import NEAR_TIE, check_same_answers, family, greedy, opened, random_ids

from radixkv import SamplingParams
from radixkv.runtime.step.executor import Executor
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import SampledStep


def run_plans(executor: Executor, plans: list[StepPlan], n_ahead: int) -> list[tuple[int, ...]]:
    """Returns the tokens of each step, with ``n_ahead`` more steps launched before a result is taken."""
    launched: deque[SampledStep] = deque()
    tokens = []
    for plan in plans:
        launched.append(executor.launch(plan).sample(None))
        if len(launched) > n_ahead:
            tokens.append(launched.popleft().result().tokens)
    return tokens + [pending.result().tokens for pending in launched]


def test_a_thousand_overlapping_steps_give_the_tokens_of_steps_run_one_by_one(sensitive_folder: Path) -> None:
    """Replays plans of the real scheduler, with chunks, forks, preemptions, copies and batches of all sizes."""
    settings = {"max_total_tokens": 2048, "max_model_len": 512, "max_num_seqs": 48, "max_num_batched_tokens": 256}
    rng = random.Random(3)
    with opened(sensitive_folder, **settings) as llm:
        plans = record(llm)
        drive, n_requests = Drive(llm, checks=False), 0
        while len(plans) < 1000:
            for prompt in family(rng.randint(1, 60), seed=len(plans), longest=60):
                how = SamplingParams(
                    temperature=rng.choice([0.0, 0.0, 1.0]),
                    seed=n_requests,
                    max_tokens=rng.randint(1, 150),
                    n=rng.choice([1, 1, 1, 3]),
                    ignore_eos=True,
                )
                drive.submit(f"r{n_requests}", prompt, how)
                n_requests += 1
            drive.run(rng, share=0.05)
        assert drive.check_all_ended().preemptions_total > 0
        assert any(plan.copies for plan in plans), "no fork copied a page"
        assert len({(len(plan.rows), plan.n_tokens) for plan in plans}) > 100
    with opened(sensitive_folder, **settings) as llm:
        one_by_one = run_plans(executor_of(llm), plans, n_ahead=0)
    for n_ahead in (1, 2):
        with opened(sensitive_folder, **settings) as llm:
            assert run_plans(executor_of(llm), plans, n_ahead) == one_by_one


def test_aborts_evictions_and_preemptions_do_not_change_other_answers(sensitive_folder: Path) -> None:
    """The pool fits only some of the requests, and every tenth turn cancels one; invariants are always checked."""
    prompts = family(120, seed=11)
    rng = random.Random(4)
    with opened(sensitive_folder, max_total_tokens=5120, max_num_seqs=32, max_num_batched_tokens=512) as llm:
        drive = Drive(llm)
        for first in range(0, len(prompts), 40):
            for number, prompt in enumerate(prompts[first : first + 40], first):
                drive.submit(f"{number}", prompt, greedy(64))
            for _ in range(10):
                drive.turn()
        drive.run(rng, share=0.1)
        stats = drive.check_all_ended()
        assert stats.preemptions_total > 0
        assert stats.pages_evicted_total > 0
        whole = [name for name, reason in drive.ends.items() if reason == "length"]
        assert set(drive.ends.values()) == {"length", "abort"}
        assert len(whole) > 60
        assert llm.flush_cache().n_pages_leased == 0
        assert llm.get_metrics().n_pages_free == stats.n_pages
    with opened(sensitive_folder, enable_prefix_caching=False, max_num_seqs=8, max_num_batched_tokens=2048) as llm:
        some = whole[::4]
        alone = [llm.generate([prompts[int(name)]], greedy(64, logprobs=20), use_tqdm=False)[0] for name in some]
    check_same_answers(alone, [drive.answers[name] for name in some], tolerance=NEAR_TIE, min_share=0.3)


def test_a_flush_between_turns_does_not_change_what_runs(sensitive_folder: Path) -> None:
    stem = random_ids(400, seed=1)
    prompts = [stem + random_ids(10 + i, seed=i) for i in range(24)]
    with opened(sensitive_folder) as llm:
        drive = Drive(llm)
        for number, prompt in enumerate(prompts):
            drive.submit(f"{number}", prompt, greedy(24))
            drive.turn()
            if number % 5 == 0:
                llm.flush_cache()
        drive.run()
        drive.check_all_ended()
        llm.flush_cache()
        answers = llm.generate(prompts, greedy(24, logprobs=20), use_tqdm=False)
    check_same_answers(answers, [drive.answers[f"{i}"] for i in range(24)], tolerance=NEAR_TIE)
