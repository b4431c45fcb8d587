"""Every page matters to the tests' own checkpoint, so that equal outputs prove that the pages were right."""

from __future__ import annotations

import random
from pathlib import Path

from radixkv.llm import LLM
from radixkv.sampling import SamplingParams
from support.wrong_page import mixed_up, pages_of

N_PAGES = 125
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


def test_one_wrong_page_changes_nearly_every_output_of_the_engine(sensitive: Path) -> None:
    llm = LLM(sensitive, max_total_tokens=6144, max_model_len=3072)
    rng = random.Random(3)
    n_changed = n_pairs = 0
    for _ in range(3):
        llm.flush_cache()
        prompt = [rng.randrange(300, 4000) for _ in range(16 * N_PAGES)]
        (right,) = llm.generate([prompt], GREEDY)
        (again,) = llm.generate([prompt], GREEDY)
        assert again.num_cached_tokens == len(prompt) - 1
        assert again.outputs == right.outputs
        pages = pages_of(llm, prompt)
        for place in (0, 1, 40, 62, 90, 123):
            with mixed_up(llm, {pages[place]: pages[(place + 31) % N_PAGES]}):
                (wrong,) = llm.generate([prompt], GREEDY)
            n_changed += wrong.outputs[0].token_ids != right.outputs[0].token_ids
            n_pairs += 1
        (restored,) = llm.generate([prompt], GREEDY)
        assert restored.outputs == right.outputs
    assert n_changed >= 0.9 * n_pairs
