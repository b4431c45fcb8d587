"""``LLM`` keeps the space before an answer's first word, which some decoders drop at the start of a text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders

from radixkv import LLM, BeamSearchParams, SamplingParams, StructuredOutputs
from radixkv.text.tokenizer import Tokenizer
from support.checkpoints import save_llama
from support.small_tokenizers import sentencepiece
from support.text_oracle import expected_text

PROMPT = "the cat"
TEMPLATE = "{{ messages[-1].content }}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama2")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend = sentencepiece(decoders.Sequence(steps))
    backend.add_special_tokens([AddedToken("[/INST]", special=True, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    save_llama(folder, vocab_size=backend.get_vocab_size() + 1)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, max_model_len=128, max_total_tokens=1024) as llm:
        yield llm


@pytest.fixture(scope="module")
def cat(folder: Path) -> int:
    """The token of `` cat``."""
    tokenizer = Tokenizer.load(folder)
    return next(token for token in range(tokenizer.vocab_size) if tokenizer.token(token) == "▁cat")


def only(token: int, **settings: Any) -> SamplingParams:
    """Returns sampling parameters under which a model says nothing but ``token``."""
    return SamplingParams(**{"temperature": 0, "max_tokens": 1, "logit_bias": {token: 100.0}} | settings)


@pytest.mark.parametrize("settings", [{}, {"max_tokens": 3, "n": 2, "logprobs": 1}, {"skip_special_tokens": False}])
def test_prompt_and_answer_read_as_their_tokens_together(
    llm: LLM, folder: Path, cat: int, settings: dict[str, Any]
) -> None:
    tokenizer = Tokenizer.load(folder)
    (output,) = llm.generate(PROMPT, only(cat, **settings), use_tqdm=False)
    for answer in output.outputs:
        assert PROMPT + answer.text == tokenizer.decode(output.prompt_token_ids + answer.token_ids)
        if answer.logprobs is not None:
            assert "".join(each[cat].decoded_token for each in answer.logprobs) == answer.text
    *_, streamed = llm.stream(PROMPT, only(cat))
    assert streamed.outputs[0].text == " cat"


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("text", ["", "[/INST]", "the[/INST]"])
def test_the_space_after_a_special_token_is_as_in_the_whole_text(
    llm: LLM, folder: Path, cat: int, text: str, skips: bool
) -> None:
    tokenizer = Tokenizer.load(folder)
    beyond = tokenizer.vocab_size  # a token of the model without any text
    prompt = [beyond, *(int(token) for token in memoryview(tokenizer.encode(text)).cast("i"))]
    (output,) = llm.generate(prompt, only(cat, skip_special_tokens=skips), use_tqdm=False)
    before, whole = (tokenizer.decode(ids, skip_special_tokens=skips) for ids in (prompt, [*prompt, cat]))
    assert before + output.outputs[0].text == whole


def test_stop_strings_and_grammars_count_the_first_space(llm: LLM, cat: int) -> None:
    (output,) = llm.generate(PROMPT, only(cat, max_tokens=4, stop=[" cat"]), use_tqdm=False)
    assert (output.outputs[0].token_ids, output.outputs[0].text) == ([cat], "")
    wanted = SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputs(regex=" cats"))
    (output,) = llm.generate(PROMPT, wanted, use_tqdm=False)
    assert output.outputs[0].text == " cats"


def test_a_continued_message_keeps_the_space(llm: LLM, cat: int) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROMPT}]
    (output,) = llm.chat(
        messages, only(cat), add_generation_prompt=False, continue_final_message=True, use_tqdm=False
    )
    assert output.outputs[0].text == " cat"


@pytest.mark.nightly
def test_beams_read_as_their_tokens_together(llm: LLM, folder: Path) -> None:
    (output,) = llm.generate(PROMPT, BeamSearchParams(beam_width=3, max_tokens=4).sampling, use_tqdm=False)
    tokenizer = Tokenizer.load(folder)
    before = tokenizer.decode(output.prompt_token_ids)
    assert [before + answer.text for answer in output.outputs] == [
        expected_text(tokenizer, output.prompt_token_ids + answer.token_ids) for answer in output.outputs
    ]
