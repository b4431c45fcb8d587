"""Adapters on several ranks in processes: they answer as one process does, and come and go on all ranks alike."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM, LoRARequest, RequestOutput, SamplingParams
from radixkv.checkpoints import resolve
from radixkv.errors import CheckpointError, DeviceLost, InvalidRequest, RadixKVError, RequestError
from radixkv.wire.adapter_messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from radixkv.wire.messages import Done, Failed, FromRuntime, Submit, Tokens, pack_tokens, unpack_tokens
from radixkv.wire.namespace import CacheNamespace
from support.cases import rest_nightly
from support.checkpoints import save_checkpoint
from support.device_support import load_oracle, random_ids
from support.lora import linear_modules, save_adapter, write_adapter
from support.processes import children

RANK = "radixkv.runtime.device.ranks.rank"
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=1, ignore_eos=True)
INVOCATION = [7, 9, 11]
SQL, LAW, JUDGE = LoRARequest("sql"), LoRARequest("law"), LoRARequest("judge")
REQUESTS = (None, SQL, LAW, JUDGE, SQL, JUDGE)
PROMPTS = [[*random_ids(n, seed=n), *INVOCATION, *random_ids(20, seed=n + 1)] for n in (40, 61, 33, 90, 5, 47)]
TIERS: dict[str, Any] = {"host_memory_bytes": 1 << 24, "load_policy": "always"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a LoRA of all of its modules, one of some, and an activated one, with ranks that divide nothing."""
    folder = tmp_path_factory.mktemp("adapters")
    save_checkpoint(folder / "base")
    oracle = load_oracle(resolve(str(folder / "base")))
    modules = linear_modules(oracle)
    save_adapter(folder / "sql", oracle, modules, seed=2, rank=5)
    save_adapter(folder / "law", oracle, linear_modules(oracle, {"q_proj", "down_proj"}), seed=3, rank=7)
    save_adapter(folder / "judge", oracle, modules, seed=4, rank=11, alora_invocation_tokens=INVOCATION)
    save_adapter(folder / "wide", oracle, modules, seed=2, rank=17)
    write_adapter(folder / "narrow", {"model.layers.0.self_attn.q_proj": (32, 24)}, seed=1)
    write_adapter(folder / "head", {"lm_head": (99, 48)}, seed=1)
    return folder


def opened(folders: Path, n_ranks: int = 2, **settings: Any) -> LLM:
    defaults = {"dtype": "float32", "max_model_len": 512, "max_total_tokens": 4096, "enable_lora": True}
    return LLM(folders / "base", device="cpu", tensor_parallel_size=n_ranks, **{**defaults, **settings})


def modules(folders: Path) -> dict[str, Path]:
    return {name: folders / name for name in ("sql", "law", "judge")}


@pytest.fixture(scope="module")
def alone(folders: Path) -> list[RequestOutput]:
    """Answers of one process, in one batch."""
    with opened(folders, 1, lora_modules=modules(folders)) as llm:
        return together(llm)


@pytest.fixture(scope="module")
def two(folders: Path) -> Iterator[LLM]:
    with opened(folders) as llm:
        yield llm


@pytest.fixture
def llm(two: LLM) -> LLM:
    """Two ranks, without adapters."""
    for name in [load.adapter.name for load in two._adapters._names]:
        two.unload_lora_adapter(name)
    two.flush_cache()
    return two


def together(llm: LLM) -> list[RequestOutput]:
    return llm.generate([list(one) for one in PROMPTS], PARAMS, use_tqdm=False, lora_request=list(REQUESTS))


def check_same(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-4)


def logprobs(output: RequestOutput) -> list[float]:
    """Returns those of the answer's tokens and of the prompt's."""
    chosen = zip(output.outputs[0].token_ids, output.outputs[0].logprobs or (), strict=True)
    prompt = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
    return [of_token[token].logprob for token, of_token in (*chosen, *prompt) if of_token]


@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_batch_of_the_model_and_adapters_equals_one_process(
    n_ranks: int, folders: Path, alone: list[RequestOutput]
) -> None:
    with opened(folders, n_ranks, lora_modules=modules(folders), max_num_batched_tokens=64) as llm:
        check_same(together(llm), alone)
        n_bytes = llm.get_metrics().adapters.n_bytes
    with opened(folders, 1, lora_modules=modules(folders)) as llm:
        whole = llm.get_metrics().adapters.n_bytes
    assert whole / n_ranks < n_bytes < whole, "of each rank"


def test_adapters_that_are_loaded_later_answer_alike(
    llm: LLM, folders: Path, alone: list[RequestOutput], tmp_path: Path
) -> None:
    for name, path in modules(folders).items():
        llm.load_lora_adapter(name, path)
    check_same(together(llm), alone)
    again = together(llm)
    for cold, warm in zip(alone, again, strict=True):
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    folder = tmp_path / "sql"
    shutil.copytree(folders / "law", folder)
    llm.load_lora_adapter("sql", folder, load_inplace=True)
    (as_sql, as_law) = llm.generate([PROMPTS[1]] * 2, PARAMS, use_tqdm=False, lora_request=[SQL, LAW])
    assert as_sql.outputs[0].logprobs == as_law.outputs[0].logprobs
    for name in modules(folders):
        llm.unload_lora_adapter(name)
    assert llm.get_metrics().adapters.n_bytes == 0


@pytest.mark.nightly
def test_adapters_take_turns_in_the_slots_of_ranks(folders: Path, alone: list[RequestOutput]) -> None:
    with opened(folders, lora_modules=modules(folders), max_loras=1, max_cpu_loras=3) as llm:
        check_same(together(llm), alone)
        assert llm.get_metrics().adapters.n_adapters == 3
        llm.unload_lora_adapter("sql")
        (output,) = llm.generate([PROMPTS[2]], PARAMS, use_tqdm=False, lora_request=LAW)
        check_same([output], [alone[2]])


def test_loads_and_unloads_beside_running_answers(llm: LLM, folders: Path, alone: list[RequestOutput]) -> None:
    """Running answers are what they are alone, also those whose adapter loses its name meanwhile."""
    loop, answers, ends = llm._open_loop, dict[str, list[int]](), dict[str, FromRuntime]()
    replies: list[FromRuntime] = []
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    def submit(name: str, index: int, adapter: str = "") -> None:
        answers[name] = []
        assert not loop.receive(Submit(name, pack_tokens(PROMPTS[index]), params, CacheNamespace(adapter=adapter)))

    def turn() -> None:
        for message in loop.turn():
            match message:
                case Tokens():
                    for item in message.items:
                        answers[item.id] += unpack_tokens(item.tokens)
                case Done() | Failed():
                    ends[message.id] = message
                case _:
                    replies.append(message)

    n_bases = 0
    for round_index in range(3):
        replies.clear()
        assert not loop.receive(LoadAdapter(f"load {round_index}", "sql", str(folders / "sql")))
        while not replies:
            if not loop.has_work or n_bases < 4:
                submit(f"base {n_bases}", 0)
                n_bases += 1
            turn()
        (loaded,) = replies
        assert isinstance(loaded, AdapterLoaded)
        for index in (1, 4):
            submit(f"sql {round_index} {index}", index, loaded.adapter.digest)
        turn()
        assert not loop.receive(UnloadAdapter(f"load {round_index}"))
    while loop.has_work:
        turn()
    loop.check()
    assert llm.get_metrics().adapters.n_bytes == 0
    assert len(ends) == len(answers) == n_bases + 6
    assert all(isinstance(end, Done) for end in ends.values())
    for name, tokens in answers.items():
        index = 0 if name.startswith("base") else int(name.rpartition(" ")[2])
        assert tokens == list(alone[index].outputs[0].token_ids)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["wide", "narrow", "head", "base", "nowhere"])
def test_bad_adapters_are_refused_as_by_one_process(llm: LLM, folders: Path, name: str) -> None:
    """Also at the start, before ranks begin."""
    texts: list[str] = []
    with opened(folders, 1) as one:
        for engine in (one, llm):
            with pytest.raises(InvalidRequest) as refused:
                engine.load_lora_adapter("sql", folders / name)
            texts.append(str(refused.value))
    assert texts[0] == texts[1]
    before = set(children(os.getpid(), RANK))
    for n_ranks in (1, 2):
        with pytest.raises(CheckpointError) as at_start:
            opened(folders, n_ranks, lora_modules={"sql": folders / name})
        assert str(at_start.value) == texts[0]
    assert set(children(os.getpid(), RANK)) == before
    llm.load_lora_adapter("sql", folders / "sql")


@pytest.mark.nightly
def test_pages_of_adapters_come_back_from_lower_tiers(folders: Path, tmp_path: Path) -> None:
    """After a restart, too; keys have the digest, which ranks do not change, and the number of ranks."""
    tiers = {**TIERS, "cache_dir": tmp_path / "disk", "lora_modules": modules(folders)}
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)

    def answer(llm: LLM) -> list[RequestOutput]:
        return [
            llm.generate([PROMPTS[3]], params, use_tqdm=False, lora_request=one)[0] for one in (None, SQL, JUDGE)
        ]

    with opened(folders, **tiers) as llm:
        cold = answer(llm)
        digests = [adapter.digest for adapter in llm._open_loop.ready.adapters]
    with opened(folders, **tiers) as llm:
        warm = answer(llm)
    with opened(folders, 1, **tiers) as llm:
        of_one = answer(llm)
        assert digests == [adapter.digest for adapter in llm._open_loop.ready.adapters]
    assert [one.num_fetched_tokens for one in cold] == [0, 0, 0]
    assert [one.num_fetched_tokens for one in of_one] == [0, 0, 0]
    for before, after in zip(cold, warm, strict=True):
        assert (after.num_fetched_tokens or 0) + (after.num_cached_tokens or 0) >= 80
        assert after.outputs == before.outputs


@pytest.mark.nightly
def test_a_rank_that_has_died_fails_a_load(folders: Path) -> None:
    before = set(children(os.getpid(), RANK))
    llm = opened(folders)
    (pid,) = set(children(os.getpid(), RANK)) - before
    try:
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RadixKVError, match="rank 1 of the model was ended by SIGKILL"):
            llm.load_lora_adapter("sql", folders / "sql")
        with pytest.raises(DeviceLost, match="rank 1 of the model was ended by SIGKILL"):
            llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False)
    finally:
        llm.shutdown()


RANK_THAT_FAILS = """
import os, signal
from pathlib import Path
from radixkv.runtime.device.adapters.loaded import LoadedAdapters
from radixkv.runtime.device.ranks import rank
read = LoadedAdapters.read
def fail(self, name, path):
    if Path("{folder}/fails").exists():
        {statement}
    return read(self, name, path)
LoadedAdapters.read = fail
rank.main()
"""


def opened_with_a_rank_that_fails(
    folders: Path, tmp_path: Path, statement: str, monkeypatch: pytest.MonkeyPatch
) -> LLM:
    """Rank 1 does this when it reads an adapter while there is a file ``fails``."""
    interpreter, script = tmp_path / "python", tmp_path / "failing.py"
    script.write_text(RANK_THAT_FAILS.format(folder=tmp_path, statement=statement))
    interpreter.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {script} "$@"\n')
    interpreter.chmod(0o755)
    (tmp_path / "fails").touch()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(interpreter))
        return opened(folders)


@pytest.mark.parametrize(
    ("statement", "text"),
    rest_nightly(
        [
            ("raise MemoryError()", r"rank 1 \(cpu\): MemoryError"),
            ("path = path.replace('sql', 'law')", r"its files have changed while rank 1 \(cpu\) read them"),
        ],
        kept=(),
    ),
    ids=["memory", "other files"],
)
def test_a_load_that_fails_on_one_rank_leaves_nothing(
    statement: str,
    text: str,
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alone: list[RequestOutput],
) -> None:
    with opened_with_a_rank_that_fails(folders, tmp_path, statement, monkeypatch) as llm:
        with pytest.raises(RequestError, match=text):
            llm.load_lora_adapter("sql", folders / "sql")
        assert llm.get_metrics().adapters.n_bytes == 0
        with pytest.raises(InvalidRequest, match="'sql', which is not loaded"):
            llm.generate([PROMPTS[1]], PARAMS, use_tqdm=False, lora_request=SQL)
        (tmp_path / "fails").unlink()
        llm.load_lora_adapter("sql", folders / "sql")
        found = llm.generate([PROMPTS[0], PROMPTS[1]], PARAMS, use_tqdm=False, lora_request=[None, SQL])
        check_same(found, alone[:2])


@pytest.mark.nightly
def test_a_rank_that_dies_while_it_loads_ends_all(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statement = "os.kill(os.getpid(), signal.SIGKILL)"
    llm = opened_with_a_rank_that_fails(folders, tmp_path, statement, monkeypatch)
    try:
        with pytest.raises(RadixKVError, match="rank 1 of the model was ended by SIGKILL"):
            llm.load_lora_adapter("sql", folders / "sql")
        with pytest.raises(DeviceLost, match="rank 1 of the model was ended by SIGKILL"):
            llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False)
    finally:
        llm.shutdown()
