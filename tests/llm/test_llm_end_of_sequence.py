"""An end-of-sequence token that only the tokenizer's configuration names ends answers as any other does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM, BeamSearchParams, SamplingParams, StructuredOutputs
from radixkv.checkpoints.embedded import embedded_folder
from support.live import serving

QUESTION = [{"role": "user", "content": "What is 41 plus 11?"}]
GREEDY = {"temperature": 0, "max_tokens": 24}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with no end-of-sequence token in its own files."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(embedded_folder(), folder)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**values, "eos_token_id": None}))
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, max_model_len=256, max_total_tokens=2048) as llm:
        yield llm


@pytest.fixture(scope="module")
def end(model: Path) -> int:
    """The token that the tokenizer's configuration names."""
    name = json.loads((model / "tokenizer_config.json").read_text())["eos_token"]
    added = json.loads((model / "tokenizer.json").read_text())["added_tokens"]
    return next(token["id"] for token in added if token["content"] == name)


def answer(llm: LLM, **settings: Any) -> Any:
    (output,) = llm.chat(QUESTION, SamplingParams(**GREEDY | settings), use_tqdm=False)
    return output.outputs[0]


def test_answers_end_with_it(llm: LLM, end: int) -> None:
    whole = answer(llm)
    assert (whole.finish_reason, whole.stop_reason, whole.token_ids[-1]) == ("stop", None, end)
    assert whole.token_ids.count(end) == 1
    n = len(whole.token_ids)
    assert answer(llm, ignore_eos=True).finish_reason == "length"
    assert end not in answer(llm, min_tokens=n + 2).token_ids[: n + 2]


def test_beams_end_with_it(llm: LLM, end: int) -> None:
    prompt = llm.chat_prompt(QUESTION)
    (searched,) = llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=24))
    best = searched.sequences[0]
    assert (best.finish_reason, best.tokens[-1]) == ("stop", end)


@pytest.mark.nightly
def test_grammars_end_with_it(llm: LLM, end: int) -> None:
    wanted = answer(llm, structured_outputs=StructuredOutputs(regex="[0-9]{2}"))
    assert (len(wanted.text), wanted.finish_reason, wanted.token_ids[-1]) == (2, "stop", end)


@pytest.mark.nightly
def test_a_server_ends_answers_with_that_of_another_tokenizer(model: Path, tmp_path: Path, end: int) -> None:
    texts, bare = tmp_path / "texts", tmp_path / "tiny"
    texts.mkdir()
    for name in TOKENIZER_FILES:
        shutil.copy(model / name, texts)
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns(*TOKENIZER_FILES))
    with serving(bare, tmp_path / "errors", "--tokenizer", str(texts)) as live:
        body = {"messages": QUESTION, **GREEDY, "return_token_ids": True}
        choice = live.http.post("/v1/chat/completions", json=body).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"][-1]) == ("stop", None, end)
        assert live.http.get("/model_info").json()["eos_token_ids"] == [end]
