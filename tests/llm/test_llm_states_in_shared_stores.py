"""Engines of models with recurrent layers that share a store: what one computes, the others start from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM, RequestOutput, SamplingParams
from radixkv.runtime.tiers import open as open_module
from radixkv.runtime.tiers.stores import shared_store as shared_store_module
from radixkv.wire.stats import DiskStats, SharedStoreStats
from support.cases import rest_nightly
from support.checkpoints import save_checkpoint
from support.device_support import HYBRIDS, random_ids
from support.fake_objects import FakeObjects

END = 2
"""A token that ends a message, as the checkpoint's configuration says."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
SHARED = {"host_memory_bytes": "16MiB", "cache_url": "s3://bucket/kv", "load_policy": "always"}


def text(n: int, seed: int) -> list[int]:
    return [one for one in random_ids(2 * n, seed=seed) if one != END][:n]


SYSTEM = [*text(141, 1), END]
CHAT = [*SYSTEM, *text(200, 2), END, *text(3, 3)]
"""A state is kept after 320 tokens."""
PROMPTS = [CHAT, [*CHAT, *text(30, 4), END, *text(40, 5), END, *text(3, 3)], [*SYSTEM, *text(90, 6), END, 5]]
"""A chat, its next turn, and another chat behind the same system prompt."""


@pytest.fixture(
    scope="module", params=rest_nightly(["qwen3.5", "qwen3.5-moe", "qwen3-next", "nemotron-h"], kept=(0,))
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    save_checkpoint(folder, **{**HYBRIDS[request.param], "eos_token_id": END})
    return folder


@pytest.fixture(scope="module")
def cold(folder: Path) -> list[Any]:
    with opened(folder, enable_prefix_caching=False) as llm:
        return [bits(one) for one in answers(llm, PROMPTS)]


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> FakeObjects:
    """The store of all engines that are opened with ``SHARED``."""
    objects = FakeObjects()
    monkeypatch.setattr(open_module, "open_objects", lambda url: objects)
    return objects


@pytest.fixture(scope="module")
def written(folder: Path) -> dict[str, bytes]:
    """What an engine has written of the system prompt, 8 pages and a state, and of the rest of ``CHAT``, 12 and a
    state, in this order."""
    objects = FakeObjects()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_module, "open_objects", lambda url: objects)
        with opened(folder, **SHARED) as llm:
            for prompt in (SYSTEM, CHAT):
                answers(llm, [prompt], "a")
    return objects.objects


@contextmanager
def opened(folder: Path, **settings: Any) -> Iterator[LLM]:
    settings = {"dtype": "float32", "max_total_tokens": 4096, **settings}
    with LLM(folder, device="cpu", max_model_len=512, **settings) as llm:
        yield llm


def answers(llm: LLM, prompts: Sequence[Sequence[int]], salt: str = "") -> list[RequestOutput]:
    salts = {"cache_salt": salt} if salt else {}
    inputs = [{"prompt_token_ids": list(one), **salts} for one in prompts]
    return llm.generate(inputs, PARAMS, use_tqdm=False)  # type: ignore[arg-type]


def bits(output: RequestOutput) -> Any:
    """Returns the tokens of an answer with all their logprobs."""
    (answer,) = output.outputs
    assert answer.logprobs is not None
    return [{token: one.logprob for token, one in position.items()} for position in answer.logprobs]


def stats(llm: LLM) -> tuple[DiskStats, SharedStoreStats]:
    disk = llm.get_metrics().shared_store
    assert disk is not None
    assert disk.shared is not None
    return disk, disk.shared


def test_engines_start_from_the_states_of_each_other_with_the_bits_of_cold_prompts(
    folder: Path, cold: list[Any], objects: FakeObjects
) -> None:
    """The second one was there before the first had written. It computes the next turn, which a third finds."""
    with opened(folder, **SHARED) as second:
        with opened(folder, **SHARED) as first:
            answers(first, [CHAT])
        found = [answers(second, [prompt])[0] for prompt in PROMPTS]
        disk, shared = stats(second)
    assert [bits(one) for one in found] == cold
    assert [one.num_cached_tokens for one in found] == [320, 320, 128]
    assert found[0].num_fetched_tokens == 320
    assert (disk.pages_lost_total, shared.failures_total) == (0, 0)
    with opened(folder, **SHARED) as third:
        found = [answers(third, [prompt])[0] for prompt in reversed(PROMPTS)]
        disk, shared = stats(third)
    assert [bits(one) for one in found] == cold[::-1]
    assert [one.num_cached_tokens for one in found] == [192, 384, 320]
    assert (disk.pages_lost_total, shared.failures_total) == (0, 0)


@pytest.mark.nightly
def test_a_salt_or_another_dtype_finds_no_state(
    folder: Path, cold: list[Any], objects: FakeObjects, written: dict[str, bytes]
) -> None:
    objects.objects |= written
    with opened(folder, **SHARED) as llm:
        found = [answers(llm, [CHAT], salt)[0] for salt in ("b", "", "a")]
    assert [bits(one) for one in found] == [cold[0]] * 3
    assert [one.num_fetched_tokens for one in found] == [0, 0, 320]
    with opened(folder, **SHARED, dtype="bfloat16") as llm:
        assert answers(llm, [CHAT], "a")[0].num_fetched_tokens == 0


@pytest.mark.parametrize(
    ("what", "is_deleted"), rest_nightly([("state", False), ("state", True), ("page", False)], kept=(1,))
)
@pytest.mark.nightly
def test_a_prompt_goes_on_from_an_earlier_state_if_an_object_is_damaged_or_deleted(
    folder: Path,
    cold: list[Any],
    objects: FakeObjects,
    written: dict[str, bytes],
    what: str,
    is_deleted: bool,
) -> None:
    """The last part of the state after 320 tokens, or a page before it, is gone; then it is written again."""
    objects.objects |= written
    n_parts = (len(written) - 8 - 12) // 2
    name = list(written)[-1 if what == "state" else 8 + n_parts + 6]
    if is_deleted:
        del objects.objects[name]
    else:
        objects.objects[name] = written[name][:-100] + bytes(b ^ 1 for b in written[name][-100:])
    with opened(folder, **SHARED) as llm:
        (found,) = answers(llm, [CHAT], "a")
        disk, shared = stats(llm)
    assert bits(found) == cold[0]
    assert found.num_cached_tokens == 128
    assert shared.failures_total == 0
    assert disk.pages_lost_total == (not is_deleted)
    assert objects.objects == written


@pytest.mark.parametrize("fails", rest_nightly([False, True], kept=(1,)))
def test_a_store_that_fails_or_hangs_is_a_miss(
    folder: Path,
    cold: list[Any],
    objects: FakeObjects,
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,
) -> None:
    for name in ("LOOK_UP_TIMEOUT_S", "STORE_TIMEOUT_S"):
        monkeypatch.setattr(shared_store_module, name, 0.05)
    objects.fails = fails
    if not fails:
        objects.is_open.clear()
    with opened(folder, **SHARED) as llm:
        found = [answers(llm, [prompt])[0] for prompt in PROMPTS]
        _, shared = stats(llm)
    assert [bits(one) for one in found] == cold
    assert [one.num_fetched_tokens for one in found] == [0, 0, 0]
    assert (shared.is_away, shared.failures_total > 0) == (True, True)


def test_an_invalidated_prefix_is_removed_from_the_store_with_its_states(
    folder: Path, objects: FakeObjects, written: dict[str, bytes]
) -> None:
    """Also the state after the system prompt."""
    objects.objects |= written
    with opened(folder, **SHARED) as llm:
        answers(llm, [CHAT, SYSTEM], "a")
        llm.invalidate_cache({"prompt_token_ids": CHAT}, cache_salt="a")
    assert not objects.objects


@pytest.mark.nightly
@pytest.mark.parametrize("folder", ["qwen3.5"], indirect=True)
def test_ranks_find_states_of_as_many_ranks_only(
    folder: Path, objects: FakeObjects, written: dict[str, bytes]
) -> None:
    objects.objects |= written
    found = []
    for _ in range(2):
        with opened(folder, **SHARED, tensor_parallel_size=2) as llm:
            found.append(answers(llm, [CHAT], "a")[0])
            assert stats(llm)[0].pages_lost_total == 0
    assert [one.num_fetched_tokens for one in found] == [0, 320]
    assert bits(found[0]) == bits(found[1])
    assert written.keys() < objects.objects.keys()
