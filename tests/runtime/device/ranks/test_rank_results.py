"""What ranks compute together is what one device computes, for all architectures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from threading import Barrier
from typing import Any, NamedTuple

import msgspec
import pytest
from torch import Tensor

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.errors import ConfigError
from radixkv.runtime.device.cpu import executor
from radixkv.runtime.device.cpu.executor import CpuExecutor, check_for_cpu
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.ops.base import Operations
from radixkv.runtime.device.ops.summed import PartMemory, Summed, SummedExperts, SummedOperations
from radixkv.runtime.device.weights.shards import Shard
from radixkv.runtime.step.plan import Row, RowSampling, StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.wire.messages import pack_tokens
from support.cases import covering, rest_nightly
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, HYBRIDS, random_ids
from support.quantized_checkpoints import save_quantized
from support.rank_threads import RankThreads, ThreadCollectives
from support.sliced_operations import SlicedOperations

Get = Callable[[str], Checkpoint]
SETTINGS = DeviceSettings(
    page_size=4, max_num_seqs=4, max_num_batched_tokens=256, max_model_len=256, kv_cache_memory_bytes=1 << 20
)
PROMPTS = [random_ids(45, seed=3), random_ids(31, seed=4)]
N_NEW = 5
UNDIVIDED = {("whole", 2), ("whole", 4), ("llama3", 4)}
"""51 values inside the MLP, and 6 heads."""
DIVIDED_HYBRIDS = [("qwen3.5", 2), ("qwen3.5-vision", 2), ("qwen3.5-moe", 2), ("qwen3-next", 2), ("nemotron-h", 2)]
DIVIDED_HYBRIDS += [("nemotron-h-moe", 2), ("nemotron-h-moe", 4)]
DIVIDED = [case for case in covering([*CHECKPOINTS], [2, 4]) if case.values not in UNDIVIDED]
DIVIDED += [pytest.param(*case) for case in DIVIDED_HYBRIDS]
OF_EACH_KIND = ("grouped", "qwen3-moe", "gemma4-shared", "gpt-oss", "opt", "qwen3.5-moe", "nemotron-h")
"""Names of models that have attention, experts and states of each kind among them."""
BY_DAY = [
    case if case.values[0] in OF_EACH_KIND else pytest.param(*case.values, marks=pytest.mark.nightly)
    for case in DIVIDED
]
"""All cases; those of other models run only at night."""


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


def answers(execute: Callable[[StepPlan], StepResult], *, chunk: int) -> list[Answer]:
    """Answers both prompts side by side, greedily, with prompts in chunks."""
    found = [Answer([], []) for _ in PROMPTS]
    tables = [tuple(range(20 * slot, 20 * slot + 20)) for slot in range(len(PROMPTS))]
    step = 0
    for start in range(0, max(map(len, PROMPTS)), chunk):
        rows = [
            row(slot, ids[start : start + chunk], start, tables[slot], is_last=start + chunk >= len(ids), index=0)
            for slot, ids in enumerate(PROMPTS)
            if start < len(ids)
        ]
        take(execute(StepPlan(step, tuple(rows))), rows, found)
        step += 1
    for index in range(1, N_NEW):
        rows = [
            row(slot, None, len(ids) + index - 1, tables[slot], is_last=True, index=index)
            for slot, ids in enumerate(PROMPTS)
        ]
        take(execute(StepPlan(step, tuple(rows), n_decode=len(rows))), rows, found)
        step += 1
    return found


def row(
    slot: int, ids: Sequence[int] | None, start: int, table: tuple[int, ...], *, is_last: bool, index: int
) -> Row:
    sampling = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, index=index, n_logprobs=1)
    n_tokens = 1 if ids is None else len(ids)
    tokens = None if ids is None else pack_tokens(ids)
    return Row(slot, start, n_tokens, tokens, start, 0, table, sampling if is_last else None)


def take(result: StepResult, rows: Sequence[Row], found: Sequence[Answer]) -> None:
    for one, token, logprobs in zip(rows, result.tokens, result.logprobs or [None] * len(rows), strict=True):
        if one.sampling is not None:
            found[one.batch_slot].tokens.append(token)
            found[one.batch_slot].logprobs.append(logprobs.logprob)


@pytest.mark.parametrize(("name", "n_ranks"), BY_DAY)
def test_ranks_answer_as_one_device(checkpoint: Get, name: str, n_ranks: int) -> None:
    one = checkpoint(name)
    check_for_cpu(one, divided(n_ranks))
    alone = CpuExecutor(one, SETTINGS)
    expected = answers(lambda plan: alone.launch(plan).sample(None).result(), chunk=64)
    with RankThreads(one, divided(n_ranks), n_ranks) as ranks:
        found = answers(ranks.execute, chunk=64)
        config = DecoderConfig.parse(one.config, one.folder / "config.json")
        n_sums = config.n_layers * (2 if config.halves is None else 1)
        if config.experts is not None and config.experts.are_beside_mlp:
            n_sums += config.n_layers
        assert {one.n_sums for one in ranks.collectives} == {n_sums * N_NEW}
    for before, after in zip(expected, found, strict=True):
        assert after.tokens == before.tokens
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-4)


@pytest.mark.parametrize(("name", "n_ranks"), BY_DAY)
def test_ranks_have_the_bits_of_one_process_that_multiplies_in_slices(
    checkpoint: Get, name: str, n_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_bits(checkpoint(name), n_ranks, monkeypatch)


def check_bits(one: Checkpoint, n_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(executor, "CpuOperations", partial(SlicedOperations, n_slices=n_ranks))
        alone = CpuExecutor(one, SETTINGS)
    expected = answers(lambda plan: alone.launch(plan).sample(None).result(), chunk=64)
    with RankThreads(one, divided(n_ranks), n_ranks) as ranks:
        assert answers(ranks.execute, chunk=64) == expected


def test_the_bias_of_a_shared_expert_is_added_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, **HYBRIDS["nemotron-h-moe"], mlp_bias=True)
    check_bits(resolve(str(tmp_path)), 2, monkeypatch)


@pytest.mark.parametrize("name", ["grouped", "qwen3.5-moe", "nemotron-h", "nemotron-h-moe", "gemma4-moe"])
def test_sums_take_two_memories_in_turn(checkpoint: Get, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a rank writes its next part while others may still read the one before."""
    taken: list[PartMemory] = []

    def take(memory: PartMemory, rows: Tensor) -> Tensor:
        taken.append(memory)
        return rows

    def recording(operations: Operations, *others: Any) -> SummedOperations:
        return SummedOperations(
            operations,
            lambda part, memory: Summed(part, partial(take, memory)),
            lambda part, memory: SummedExperts(part, partial(take, memory)),
            others[-1],
        )

    monkeypatch.setattr(executor, "SummedOperations", recording)
    one = checkpoint(name)
    alone = CpuExecutor(one, divided(1), ThreadCollectives(0, [None], Barrier(1)))
    ids = PROMPTS[0]
    rows = (row(0, ids, 0, tuple(range(20)), is_last=True, index=0),)
    alone.launch(StepPlan(0, rows)).sample(None).result()
    assert len(taken) >= DecoderConfig.parse(one.config, one.folder / "config.json").n_layers
    assert all(before != after for before, after in pairwise(taken))


def divided(n_ranks: int) -> DeviceSettings:
    """Returns the settings of each of several ranks."""
    return msgspec.structs.replace(SETTINGS, tensor_parallel_size=n_ranks)


@pytest.mark.parametrize(
    "name",
    rest_nightly(
        ["grouped", "biased", "gemma3", "gpt-oss", "qwen3.5", "qwen3-next", "nemotron-h", "gemma4-moe"],
        kept=(3, 4),
    ),
)
def test_chunks_change_no_bit(checkpoint: Get, name: str) -> None:
    with RankThreads(checkpoint(name), divided(2), 2) as ranks:
        whole = answers(ranks.execute, chunk=64)
        assert answers(ranks.execute, chunk=7) == whole


def test_what_does_not_divide_is_refused(checkpoint: Get) -> None:
    for n_ranks, message in ((3, "does not divide num_attention_heads, 4"), (8, "num_attention_heads")):
        with pytest.raises(ConfigError, match=f"tensor_parallel_size {n_ranks} .*{message}"):
            check_for_cpu(checkpoint("grouped"), divided(n_ranks))
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 does not divide intermediate_size, 51"):
        check_for_cpu(checkpoint("whole"), divided(2))


def test_delta_nets_that_do_not_divide_are_refused(checkpoint: Get) -> None:
    """Also where attention's heads divide; a rank has whole key heads."""
    with pytest.raises(ConfigError, match="size 4 does not divide linear_num_key_heads, 2"):
        check_for_cpu(checkpoint("qwen3.5"), divided(4))
    with pytest.raises(ConfigError, match="size 4 does not divide n_groups, 2"):
        check_for_cpu(checkpoint("nemotron-h"), divided(4))


def test_kv_heads_that_do_not_divide_are_refused_in_any_layer(checkpoint: Get) -> None:
    """Three ranks could have parts of the layers with 6 KV heads, and not of those with 2."""
    one = checkpoint("gemma4")
    config = one.config | {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 96}
    config |= {"per_layer_config": {"1": {"num_key_value_heads": 2}}}
    model = DecoderConfig.parse(config, one.folder / "config.json")
    with pytest.raises(ConfigError, match="size 3 and num_key_value_heads 2: neither divides the other"):
        model.shard(3)
    assert [heads.n_kv_heads for heads in model.shard(2).heads] == [3, 1, 3, 3, 3]


@pytest.mark.parametrize("n_kv_heads", [(1,), (2, 1), (6, 2), (3, 2), (12, 4, 1)])
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 6, 12])
def test_ranks_with_the_same_part_of_a_page_have_the_same_kv_heads(
    checkpoint: Get, n_kv_heads: tuple[int, ...], n_ranks: int
) -> None:
    """In all layers. So one of them stores it in host memory, and all load it."""
    if any(n % n_ranks and n_ranks % n for n in n_kv_heads):
        return
    one = checkpoint("gemma4")
    config = DecoderConfig.parse(one.config, one.folder / "config.json")
    heads = tuple(replace(config.heads[0], n_kv_heads=n_kv_heads[i % len(n_kv_heads)]) for i in range(5))
    n_parts = replace(config, heads=heads).n_page_parts(n_ranks)
    shards = [Shard(rank, n_ranks) for rank in range(n_ranks)]
    cuts = [[shard.cut((n,), (max(1, n // n_ranks),)) for n in n_kv_heads] for shard in shards]
    parts = [rank * n_parts // n_ranks for rank in range(n_ranks)]
    assert sorted(set(parts)) == list(range(n_parts))
    for rank, other in combinations(range(n_ranks), 2):
        assert (cuts[rank] == cuts[other]) >= (parts[rank] == parts[other])


def test_a_shared_expert_that_does_not_divide_is_refused(checkpoint: Get) -> None:
    one = checkpoint("qwen3.5-attention")
    config = one.config | {"shared_expert_intermediate_size": 21}
    with pytest.raises(ConfigError, match="size 2 does not divide the shared expert's intermediate size, 21"):
        DecoderConfig.parse(config, one.folder / "config.json").shard(2)


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq by activation", "mxfp4"])
def test_quantized_checkpoints_answer_as_on_one_device(tmp_path: Path, name: str) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    save_quantized(tmp_path, name, **(CHECKPOINTS["gpt-oss"] if name == "mxfp4" else sizes))
    one = resolve(str(tmp_path / "quantized"))
    alone = CpuExecutor(one, SETTINGS)
    (expected, _) = answers(lambda plan: alone.launch(plan).sample(None).result(), chunk=64)
    with RankThreads(one, divided(2), 2) as ranks:
        (found, _) = answers(ranks.execute, chunk=64)
    assert found.tokens == expected.tokens
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
