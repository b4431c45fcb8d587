"""What ranks compute with adapters is what one device computes, for the model and several adapters in one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from radixkv.checkpoints import Checkpoint, resolve
from radixkv.runtime.device.adapters.sources import find_adapters
from radixkv.runtime.device.cpu import executor
from radixkv.runtime.device.cpu.executor import CpuExecutor
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.step.plan import Row, RowSampling, StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.settings.adapters import LoraModule
from radixkv.settings.config import AdapterConfig
from radixkv.wire.messages import pack_tokens
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, HYBRIDS, load_oracle, random_ids
from support.lora import linear_modules, save_adapter
from support.rank_threads import RankThreads
from support.sliced_adapters import SlicedLoraOperations
from support.sliced_operations import SlicedOperations

N_NEW, CHUNK, N_PAGES = 5, 19, 20
LENGTHS = {"": 45, "sql": 33, "law": 20, "judge": 51}
"""Of the prompts that the model and each adapter answer."""
INVOCATION = 30
"""Where ``judge`` begins to act, which is within a chunk."""
SETTINGS = DeviceSettings(
    page_size=4, max_num_seqs=4, max_num_batched_tokens=256, max_model_len=256, kv_cache_memory_bytes=1 << 20
)
CASES = [
    *(("grouped", 2), ("grouped", 4), ("biased", 2), ("qwen2", 4), ("qwen3", 2), ("qwen3-moe", 2), ("mixtral", 4)),
    *(("gemma3", 2), ("gemma4", 2), ("gemma4-shared", 2), ("gemma4-moe", 4), ("gpt-oss", 2), ("opt", 4)),
    *(("qwen3.5", 2), ("qwen3.5-moe", 2), ("qwen3.5-attention", 2), ("qwen3-next", 2)),
]
BY_DAY = {("grouped", 4), ("qwen3.5", 2)}
"""The other cases run only at night."""


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


class World(NamedTuple):
    """A model with adapters."""

    checkpoint: Checkpoint
    settings: DeviceSettings
    digests: Mapping[str, str]
    """By name; that of the model is empty."""


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    """With adapters of all modules, of some, and an activated one; no rank divides any size of these models."""
    save_checkpoint(tmp_path / "base", **(CHECKPOINTS | HYBRIDS)[request.param])
    checkpoint = resolve(str(tmp_path / "base"))
    oracle = load_oracle(checkpoint)
    modules = linear_modules(oracle)
    save_adapter(tmp_path / "sql", oracle, modules, seed=2, rank=5)
    save_adapter(tmp_path / "law", oracle, modules[::2], seed=3, rank=7)
    save_adapter(tmp_path / "judge", oracle, modules, seed=4, rank=11, alora_invocation_tokens=[1])
    return world_of(checkpoint, tmp_path)


def world_of(checkpoint: Checkpoint, folder: Path) -> World:
    named = AdapterConfig(
        lora_modules=tuple(LoraModule(name, str(folder / name)) for name in ("sql", "law", "judge"))
    )
    config = DecoderConfig.parse(checkpoint.config, checkpoint.folder / "config.json")
    adapters = find_adapters(named, config, n_ranks=1, task="generate")
    settings = msgspec.structs.replace(SETTINGS, has_adapters=True, adapters=adapters)
    return World(checkpoint, settings, {"": ""} | {one.name: one.digest for one in adapters})


def answers(world: World, execute: Callable[[StepPlan], StepResult], names: Sequence[str]) -> dict[str, Answer]:
    """Answers a prompt with each of these side by side, greedily, with prompts in chunks."""
    found = {name: Answer([], []) for name in names}
    prompts = {name: random_ids(LENGTHS[name], seed=LENGTHS[name]) for name in names}

    def row(name: str, ids: Sequence[int] | None, start: int) -> Row:
        n_tokens, slot = 1 if ids is None else len(ids), list(LENGTHS).index(name)
        is_active = name != "judge" or start + n_tokens > INVOCATION
        first, index = N_PAGES * slot, start + n_tokens - LENGTHS[name]
        return Row(
            slot,
            start,
            n_tokens,
            None if ids is None else pack_tokens(ids),
            start,
            0,
            tuple(range(first, first + N_PAGES)),
            None if index < 0 else RowSampling(0.0, 0, 1.0, 0, index, n_logprobs=1),
            adapter=world.digests[name] if is_active else "",
            adapter_start=INVOCATION if name == "judge" else 0,
        )

    def take(plan: StepPlan, of_rows: Sequence[str]) -> None:
        result = execute(plan)
        logprobs = result.logprobs or [None] * len(of_rows)
        for name, one, token, of_token in zip(of_rows, plan.rows, result.tokens, logprobs, strict=True):
            if one.sampling is not None:
                found[name].tokens.append(token)
                found[name].logprobs.append(of_token.logprob)

    n_steps = 0
    for start in range(0, max(map(len, prompts.values())), CHUNK):
        left = [name for name, ids in prompts.items() if start < len(ids)]
        rows = tuple(row(name, prompts[name][start : start + CHUNK], start) for name in left)
        take(StepPlan(n_steps, rows), left)
        n_steps += 1
    for index in range(N_NEW - 1):
        rows = tuple(row(name, None, LENGTHS[name] + index) for name in names)
        take(StepPlan(n_steps, rows, n_decode=len(rows)), list(names))
        n_steps += 1
    return found


def alone(world: World) -> Callable[[StepPlan], StepResult]:
    one = CpuExecutor(world.checkpoint, world.settings)
    return lambda plan: one.launch(plan).sample(None).result()


def cases(*which: tuple[str, int]) -> pytest.MarkDecorator:
    marked = [pytest.param(*case, marks=[] if case in BY_DAY else pytest.mark.nightly) for case in which]
    return pytest.mark.parametrize(("world", "n_ranks"), marked, indirect=["world"])


@cases(*CASES)
def test_ranks_answer_as_one_device(world: World, n_ranks: int) -> None:
    expected = answers(world, alone(world), list(LENGTHS))
    assert len({tuple(one.logprobs) for one in expected.values()}) == len(LENGTHS)
    with RankThreads(world.checkpoint, world.settings, n_ranks) as ranks:
        found = answers(world, ranks.execute, list(LENGTHS))
    for name, answer in expected.items():
        assert found[name].tokens == answer.tokens
        assert found[name].logprobs == pytest.approx(answer.logprobs, abs=1e-4)


@pytest.mark.nightly
@cases(*CASES)
def test_ranks_have_the_bits_of_one_process_that_multiplies_in_slices(
    world: World, n_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slices of A, of B and of the products are summed as ranks sum theirs."""
    with monkeypatch.context() as patched:
        patched.setattr(executor, "CpuOperations", partial(SlicedOperations, n_slices=n_ranks))
        patched.setattr(executor, "LoraOperations", partial(SlicedLoraOperations, n_slices=n_ranks))
        execute = alone(world)
    expected = answers(world, execute, list(LENGTHS))
    with RankThreads(world.checkpoint, world.settings, n_ranks) as ranks:
        assert answers(world, ranks.execute, list(LENGTHS)) == expected
        for name in LENGTHS:
            assert answers(world, ranks.execute, [name]) == {name: expected[name]}, "whatever is beside it"
