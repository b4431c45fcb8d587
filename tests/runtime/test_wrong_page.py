"""Every page of a prompt matters to the embedded model, so that equal outputs prove that the pages were right."""

from __future__ import annotations

import random
from array import array

from radixkv.llm import LLM
from radixkv.runtime.device.cpu import CpuExecutor
from radixkv.sampling import SamplingParams
from radixkv.tree.node import Namespace

N_PAGES = 125
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


def test_one_wrong_page_changes_nearly_every_output_of_the_engine() -> None:
    llm = LLM("tiny", max_total_tokens=6144, max_model_len=3072)
    loop = llm._live
    executor = loop._executor
    assert isinstance(executor, CpuExecutor)
    cache = loop._scheduler.cache
    rng = random.Random(3)
    n_changed = n_pairs = 0
    for _ in range(3):
        llm.flush_cache()
        prompt = [rng.randrange(300, 4000) for _ in range(16 * N_PAGES)]
        (right,) = llm.generate([prompt], GREEDY)
        (again,) = llm.generate([prompt], GREEDY)
        assert again.num_cached_tokens == len(prompt) - 1
        assert again.outputs == right.outputs
        holding = cache.open(Namespace(), array("i", prompt).tobytes())
        pages = list(holding.table)
        cache.close(holding)
        for place in (0, 1, 40, 62, 90, 123):
            page, other = pages[place], pages[(place + 31) % N_PAGES]
            kept = executor.pool.k[:, page].clone(), executor.pool.v[:, page].clone()
            executor.pool.k[:, page] = executor.pool.k[:, other]
            executor.pool.v[:, page] = executor.pool.v[:, other]
            (wrong,) = llm.generate([prompt], GREEDY)
            executor.pool.k[:, page], executor.pool.v[:, page] = kept
            n_changed += wrong.outputs[0].token_ids != right.outputs[0].token_ids
            n_pairs += 1
        (restored,) = llm.generate([prompt], GREEDY)
        assert restored.outputs == right.outputs
    assert n_changed >= 0.9 * n_pairs
