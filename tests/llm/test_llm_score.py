"""Tests of ``LLM.score`` against Transformers, as the model card of Qwen3-Reranker computes scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from radixkv.errors import CheckpointError, ConfigError, InvalidRequest, UnsupportedFeature
from radixkv.llm import LLM
from support.checkpoints import save_checkpoint
from support.small_tokenizers import byte_letters, with_yes_and_no

QUERY = "Who lays eggs?"
DOCUMENTS = ["Hens lay eggs.", "Cows give milk; hens, on the other hand, do not.", "日本", "x " * 80]
SIZES: dict[str, Any] = {"max_total_tokens": 8192, "max_model_len": 1024, "device": "cpu"}


def save_reranker(folder: Path, tokenizer: tokenizers.Tokenizer | None = None, model_type: str = "qwen3") -> Path:
    tokenizer = tokenizer or with_yes_and_no()
    tokenizer.save(str(folder / "tokenizer.json"))
    save_checkpoint(folder, model_type=model_type, vocab_size=tokenizer.get_vocab_size())
    return folder


def card_prompt(query: str, document: str, instruction: str | None = None) -> str:
    """Returns the prompt as the model card puts it together."""
    if instruction is None:
        instruction = "Given a web search query, retrieve relevant passages that answer the query"
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return prefix + pair + "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def oracle(folder: Path, prompts: Sequence[str], dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the probabilities of yes between yes and no, as the card does: of log-softmax, exponentiated."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    answers = [tokenizer.token_to_id("no"), tokenizer.token_to_id("yes")]
    found = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        with torch.no_grad():
            found.append(model(torch.tensor([ids])).logits[0, -1, answers].float())
    return torch.nn.functional.log_softmax(torch.stack(found), dim=1)[:, 1].exp()


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reranker(tmp_path_factory.mktemp("reranker"))


@pytest.mark.parametrize("max_num_batched_tokens", [48, 4096])
def test_scores_are_those_of_the_model_card(max_num_batched_tokens: int, reranker: Path) -> None:
    with LLM(reranker, task="score", max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=8, **SIZES) as llm:
        cold = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        warm = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        (alone,) = llm.score(QUERY, DOCUMENTS[1], use_tqdm=False)
        other = llm.score([QUERY, "Who is hen?"], DOCUMENTS[:2], use_tqdm=False, instruction="Find jokes.")
    scores = [output.outputs.score for output in cold]
    expected = oracle(reranker, [card_prompt(QUERY, document) for document in DOCUMENTS])
    torch.testing.assert_close(torch.tensor(scores), expected, rtol=0, atol=2e-5)
    assert max(scores) - min(scores) > 0.05
    assert [output.outputs.score for output in warm] == scores
    assert alone.outputs.score == scores[1]
    assert min(output.num_cached_tokens for output in warm) > 300  # of the prompt before the query
    prompts = [
        card_prompt(QUERY, DOCUMENTS[0], "Find jokes."),
        card_prompt("Who is hen?", DOCUMENTS[1], "Find jokes."),
    ]
    found = torch.tensor([output.outputs.score for output in other])
    torch.testing.assert_close(found, oracle(reranker, prompts), rtol=0, atol=2e-5)


@pytest.mark.nightly
def test_scores_in_bfloat16_are_near_those_in_float32(reranker: Path) -> None:
    prompts = [card_prompt(QUERY, document) for document in DOCUMENTS]
    exact, other = oracle(reranker, prompts), oracle(reranker, prompts, torch.bfloat16)
    with LLM(reranker, task="score", dtype="bfloat16", **SIZES) as llm:
        found = torch.tensor([one.outputs.score for one in llm.score(QUERY, DOCUMENTS, use_tqdm=False)])
    assert (found - exact).abs().max() < 2 * (other - exact).abs().max() + 0.01


def test_a_model_is_refused_whose_scores_are_not_known(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    save_reranker(tmp_path / "llama", model_type="llama")
    with pytest.raises(CheckpointError, match="LlamaForCausalLM"):
        LLM(tmp_path / "llama", task="score", **SIZES)
    (tmp_path / "mute").mkdir()
    save_reranker(tmp_path / "mute", byte_letters())
    with pytest.raises(ConfigError, match="the tokens yes and no"):
        LLM(tmp_path / "mute", task="score", **SIZES)
    (tmp_path / "flat").mkdir()
    save_reranker(tmp_path / "flat", byte_letters([("y", "e"), ("ye", "s"), ("n", "o")], special=["<|im_end|>"]))
    with pytest.raises(ConfigError, match=r"special token <\|im_start\|>"):
        LLM(tmp_path / "flat", task="score", **SIZES)


def test_numbers_of_queries_and_documents_must_fit(reranker: Path) -> None:
    with LLM(reranker, task="score", **SIZES) as llm:
        for queries, documents, field in (
            ([QUERY] * 2, DOCUMENTS, "queries"),
            ([], DOCUMENTS, "queries"),
            (QUERY, [], "documents"),
        ):
            with pytest.raises(InvalidRequest, match=field):
                llm.score(queries, documents, use_tqdm=False)
        with pytest.raises(InvalidRequest, match="task='embed'"):
            llm.embed("eggs", use_tqdm=False)


def test_what_is_no_text_is_refused_by_name(reranker: Path) -> None:
    """Other values would be scored as what Python shows of them."""
    with LLM(reranker, task="score", **SIZES) as llm:
        for queries, documents, named in (
            ("a", [{"text": "b"}], r"documents\[0\] is \{'text': 'b'\}"),
            ("a", {"content": []}, "documents is"),
            ("a", ["b", 5], r"documents\[1\] is 5"),
            ([[1, 2]], ["b"], r"queries\[0\] is \[1, 2\]"),
            ("a", None, "documents is None"),
            (None, "a", "queries is None"),
            ("a", b"b", "documents is"),
        ):
            with pytest.raises(InvalidRequest, match=f"^{named}"):
                llm.score(queries, documents, use_tqdm=False)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="instruction is 5"):
            llm.score("a", "b", use_tqdm=False, instruction=5)  # type: ignore[arg-type]
        for name in ("chat_template", "truncate_prompt_tokens", "lora_request", "pooling_params", "nonsense"):
            with pytest.raises(UnsupportedFeature, match=name):
                llm.score("a", "b", use_tqdm=False, **{name: "x"})
        (score,) = llm.score("a", "b", use_tqdm=False, lora_request=None)  # vLLM's default asks for nothing
    assert 0 < score.outputs.score < 1
