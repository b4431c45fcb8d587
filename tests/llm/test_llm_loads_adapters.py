"""Adapters that ``LLM`` loads and unloads: answers are those of an engine that began with them, never of others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM, LoRARequest, SamplingParams
from radixkv.checkpoints import resolve
from radixkv.checkpoints.adapters import AdapterFolder, patterns
from radixkv.cli import main
from radixkv.errors import CheckpointError, ConfigError, InvalidRequest, ModelNotFound
from support.checkpoints import save_checkpoint
from support.device_support import load_oracle, random_ids
from support.lora import linear_modules, save_adapter

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
PROMPT = random_ids(70, seed=1)
SQL = LoRARequest("sql")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    save_checkpoint(folder / "base")
    oracle = load_oracle(resolve(str(folder / "base")))
    save_adapter(folder / "sql", oracle, linear_modules(oracle), seed=2)
    save_adapter(folder / "law", oracle, linear_modules(oracle, {"q_proj", "down_proj"}), seed=3, rank=7)
    save_adapter(folder / "wide", oracle, linear_modules(oracle), seed=2, rank=17)
    return folder


def opened(folders: Path, **settings: Any) -> LLM:
    defaults = {"dtype": "float32", "max_model_len": 512, "max_total_tokens": 4096, "enable_lora": True}
    return LLM(folders / "base", device="cpu", **{**defaults, **settings})


@pytest.fixture
def llm(folders: Path) -> Iterator[LLM]:
    with opened(folders) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(folders: Path) -> dict[str, Any]:
    """Answers of an engine without adapters, and of one that began with both."""
    with opened(folders, enable_lora=False) as llm:
        alone = answer(llm)[0]
    with opened(folders, lora_modules={name: folders / name for name in ("sql", "law")}) as llm:
        return {"": alone} | {name: answer(llm, LoRARequest(name))[0] for name in ("sql", "law")}


def answer(llm: LLM, request: LoRARequest | None = None) -> tuple[Any, int]:
    (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False, lora_request=request)
    return output.outputs, output.num_cached_tokens


@pytest.mark.parametrize("n_gpus", [1, 2])
def test_plan_counts_what_servers_have_in_host_memory(tmp_path: Path, n_gpus: int) -> None:
    """On a GPU the arrays of the files, in each rank; on the CPU the matrices, which here are as many bytes."""
    save_checkpoint(tmp_path / "base", head_dim=64)
    config, file = tmp_path / "base" / "config.json", tmp_path / "plan.jsonl"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"torch_dtype": "float16", "dtype": "float16"}))
    flags = "--max-loras 2 --max-cpu-loras 2 --gpu-memory 40GB --gpus".split()
    assert main(["plan", str(config), *flags, str(n_gpus), "--prompt", "100", "--output-file", str(file)]) == 0
    planned = json.loads(file.read_text())["host_adapter_bytes"]
    oracle = load_oracle(resolve(str(tmp_path / "base")))
    adapters = {f"a{seed}": tmp_path / f"a{seed}" for seed in range(2)}
    for seed, folder in enumerate(adapters.values()):
        save_adapter(folder, oracle, linear_modules(oracle), seed=seed, rank=16)
    files = [AdapterFolder.open(folder, max_rank=16) for folder in adapters.values()]
    in_float32 = 2 * planned
    assert in_float32 == n_gpus * sum(file.n_bytes for file in files)
    with opened(tmp_path, lora_modules=adapters) as llm:
        assert in_float32 == n_gpus * llm.get_metrics().adapters.n_bytes


def test_an_adapter_of_an_unknown_name_is_loaded(llm: LLM, folders: Path, expected: dict[str, Any]) -> None:
    assert answer(llm) == (expected[""], 0), "to the bit what an engine without adapters answers"
    assert answer(llm, LoRARequest("sql", 1, str(folders / "sql"))) == (expected["sql"], 0)
    assert answer(llm, SQL) == (expected["sql"], 64), "the name is enough by now"
    assert llm.get_metrics().adapters.n_adapters == 1


def test_other_bytes_never_hit_and_the_same_bytes_do(
    llm: LLM, folders: Path, tmp_path: Path, expected: Any
) -> None:
    folder = tmp_path / "sql"
    shutil.copytree(folders / "sql", folder)
    llm.load_lora_adapter("sql", folder)
    assert answer(llm, SQL) == (expected["sql"], 0)
    shutil.copytree(folders / "law", folder, dirs_exist_ok=True)
    assert answer(llm, SQL) == (expected["sql"], 64), "what was loaded counts, not what is in the folder now"
    llm.load_lora_adapter("sql", folder, load_inplace=True)
    assert answer(llm, SQL) == (expected["law"], 0)
    n_bytes = llm.get_metrics().adapters.n_bytes
    llm.unload_lora_adapter("sql")
    assert (llm.get_metrics().adapters.n_adapters, llm.get_metrics().adapters.n_bytes) == (0, 0)
    with pytest.raises(InvalidRequest, match=r"'sql', which is not loaded; .*loaded: none"):
        answer(llm, SQL)
    llm.load_lora_adapter("sql", folders / "sql")
    assert answer(llm, SQL) == (expected["sql"], 64), "pages stay in the cache"
    llm.load_lora_adapter("law", folder)
    assert answer(llm, LoRARequest("law")) == (expected["law"], 64), "whatever the name"
    assert llm.get_metrics().adapters.n_bytes > n_bytes
    assert answer(llm)[0] == expected[""]


def test_equal_adapters_have_one_copy_of_the_weights(llm: LLM, folders: Path, expected: dict[str, Any]) -> None:
    llm.load_lora_adapter("a", folders / "sql")
    n_bytes = llm.get_metrics().adapters.n_bytes
    llm.load_lora_adapter("b", folders / "sql")
    assert llm.get_metrics().adapters.n_bytes == n_bytes > 0
    llm.unload_lora_adapter("a")
    assert answer(llm, LoRARequest("b"))[0] == expected["sql"]


def test_an_adapter_is_known_by_any_path_to_its_folder(
    llm: LLM, folders: Path, tmp_path: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders)
    (tmp_path / "link").symlink_to(folders / "sql")
    for path in ("sql", "./sql/", folders / "sql", "law/../sql", tmp_path / "link", ""):
        assert answer(llm, LoRARequest("sql", 1, path))[0] == expected["sql"], path
    for path in ("law", "a\0b", "a" * 5000):
        with pytest.raises(InvalidRequest, match="LLM has it from 'sql'; give that folder, or none"):
            answer(llm, LoRARequest("sql", 1, path))


def test_wrong_uses(folders: Path) -> None:
    with opened(folders, max_cpu_loras=1) as llm:
        llm.load_lora_adapter("sql", folders / "sql")
        for name, path, text in (
            ("sql", "sql", "'sql' is loaded already; .*load_inplace"),
            ("law", "law", "'law' would be one more than max_cpu_loras 1; unload one of 'sql'"),
        ):
            with pytest.raises(InvalidRequest, match=text):
                llm.load_lora_adapter(name, folders / path)
        for path, text in (
            ("base", "base has no adapter_config.json; give the folder"),
            ("absent", "absent is no folder; give the folder"),
            ("a" * 300, "cannot be read: File name too long; give the folder"),
            ("sql/adapter_config.json", "adapter_config.json is no folder; give the folder"),
            ("wide", "rank 17, above the limit of 16"),
        ):
            with pytest.raises(InvalidRequest, match=f"adapter 'sql': .*{text}"):
                llm.load_lora_adapter("sql", folders / path, load_inplace=True)
        for wrong in ("", 7, None, "a\nb", "a" * 257):
            with pytest.raises(InvalidRequest, match="^lora_name is .*; give 1 to 256 printable characters$"):
                llm.load_lora_adapter(wrong, folders / "law")  # type: ignore[arg-type]
        for wrong in ("", 7, None):
            with pytest.raises(InvalidRequest, match=rf"^lora_path is {wrong!r}; give the adapter's folder$"):
                llm.load_lora_adapter("law", wrong)  # type: ignore[arg-type]
        assert answer(llm, SQL)[1] == 0, "the one before is still there"
        with pytest.raises(InvalidRequest, match=r"no adapter 'law' is loaded; .*loaded: 'sql'"):
            llm.unload_lora_adapter("law")
    with opened(folders, enable_lora=False) as llm, pytest.raises(InvalidRequest, match="enable_lora"):
        llm.load_lora_adapter("sql", folders / "sql")


def test_a_stream_must_end_before_an_adapter_is_loaded(llm: LLM, folders: Path) -> None:
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    with pytest.raises(ConfigError, match="answering another call"):
        llm.load_lora_adapter("sql", folders / "sql")
    stream.close()
    llm.load_lora_adapter("sql", folders / "sql")
    with pytest.raises(StopIteration):
        next(stream)


def test_an_adapter_is_not_unloaded_while_a_stream_runs(llm: LLM, folders: Path) -> None:
    llm.load_lora_adapter("sql", folders / "sql")
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    with pytest.raises(ConfigError, match="answering another call"):
        llm.unload_lora_adapter("sql")
    stream.close()
    assert answer(llm, SQL)[1] == 0
    llm.unload_lora_adapter("sql")
    with pytest.raises(ModelNotFound, match="no adapter 'sql' is loaded"):
        llm.unload_lora_adapter("sql")


def test_a_request_may_load_its_folder_again(llm: LLM, folders: Path, tmp_path: Path, expected: Any) -> None:
    """As vLLM's requests say it, once for all prompts of a call."""
    shutil.copytree(folders / "sql", tmp_path / "mine")
    request = LoRARequest("mine", 1, tmp_path / "mine", base_model_name="base", load_inplace=True)
    assert (request.name, request.adapter_id, request.path) == ("mine", 1, str(tmp_path / "mine"))
    assert answer(llm, request)[0] == expected["sql"]
    shutil.rmtree(tmp_path / "mine")
    shutil.copytree(folders / "law", tmp_path / "mine")
    outputs = llm.generate([PROMPT] * 3, PARAMS, use_tqdm=False, lora_request=request)
    assert [one.outputs for one in outputs] == [expected["law"]] * 3
    stats = llm.get_metrics().adapters
    assert stats is not None
    assert (stats.n_adapters, stats.n_unloaded) == (1, 0)
    with pytest.raises(InvalidRequest, match="lora_path is ''; give the adapter's folder"):
        answer(llm, LoRARequest("mine", load_inplace=True))


def test_a_call_that_fails_leaves_no_adapter_loaded(llm: LLM, folders: Path) -> None:
    llm.load_lora_adapter("law", folders / "law")
    wrong = LoRARequest("wide", lora_path=folders / "wide")
    with pytest.raises(InvalidRequest, match="above the limit of 16"):
        llm.generate(
            [PROMPT] * 3, PARAMS, lora_request=[LoRARequest("law"), LoRARequest("sql", 1, folders / "sql"), wrong]
        )
    with pytest.raises(ModelNotFound, match="loaded: 'law'"):
        answer(llm, SQL)


def test_pins_and_sessions_end_with_an_adapter(llm: LLM, folders: Path) -> None:
    """A load of the same bytes finds the pages, which are evicted like others. Those of the model stay pinned."""
    llm.load_lora_adapter("sql", folders / "sql")
    for request in (None, SQL):
        answer(llm, request)
        assert llm.pin_cache(PROMPT, lora_request=request).n_pinned == 64
    llm.unload_lora_adapter("sql")
    llm.load_lora_adapter("sql", folders / "sql")
    assert llm.explain(PROMPT).n_pinned == 64
    explained = llm.explain(PROMPT, lora_request=SQL)
    assert (explained.n_cached, explained.n_pinned) == (64, 0)


@pytest.mark.parametrize("n_ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_pattern_that_takes_for_ever_is_refused_at_the_start_and_later(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_ranks: int
) -> None:
    monkeypatch.setattr(patterns, "_CPU_S", 1)
    shutil.copytree(folders / "sql", tmp_path / "slow")
    config = tmp_path / "slow" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": "(.*.*)*x|.*proj"}))
    text = r"target_modules is '\(\.\*\.\*\)\*x\|\.\*proj'; to match it .* takes more than 1 s"
    with pytest.raises(CheckpointError, match=text):
        opened(folders, lora_modules={"slow": tmp_path / "slow"}, tensor_parallel_size=n_ranks)
    with opened(folders, tensor_parallel_size=n_ranks) as llm:
        with pytest.raises(InvalidRequest, match=text):
            llm.load_lora_adapter("slow", tmp_path / "slow")
        llm.load_lora_adapter("slow", folders / "sql")
