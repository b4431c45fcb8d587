"""Tests of ``LLM.chat`` against Transformers' templates and ``LLM.generate``."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from radixkv.errors import InvalidRequest
from radixkv.llm import LLM
from radixkv.wire.sampling import SamplingParams
from support.checkpoints import save_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
CHAT = [
    {"role": "system", "content": "You are a teacher."},
    {"role": "user", "content": "How many legs do 12 hens have?"},
]


@pytest.fixture(scope="module")
def oracle(sensitive: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(sensitive)


def test_chat_equals_generate_with_the_rendered_template(llm: LLM, oracle: AutoTokenizer) -> None:
    text = oracle.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = oracle.encode(text, add_special_tokens=False)
    assert ids.count(oracle.bos_token_id) == 1
    (chat,) = llm.chat(CHAT, GREEDY)
    (plain,) = llm.generate([ids], GREEDY)
    assert chat.prompt_token_ids == ids == llm.chat_prompt(CHAT)
    assert chat.outputs == plain.outputs


def test_contents_may_be_lists_of_text_parts(llm: LLM) -> None:
    parts = [{"type": "text", "text": "You are"}, {"type": "text", "text": "a teacher."}]
    assert llm.chat_prompt([{"role": "system", "content": parts}]) == llm.chat_prompt(
        [{"role": "system", "content": "You are\na teacher."}]
    )


def test_several_conversations_are_answered_in_order(llm: LLM) -> None:
    other = [{"role": "user", "content": "And 7 cows?"}]
    first, second = llm.chat([CHAT, other], [GREEDY, GREEDY])
    assert first.outputs == llm.chat(CHAT, GREEDY)[0].outputs
    assert second.outputs == llm.chat(other, GREEDY)[0].outputs != first.outputs


def test_the_next_turn_reuses_the_one_before(llm: LLM) -> None:
    llm.flush_cache()
    (first,) = llm.chat(CHAT, GREEDY)
    more = [*CHAT, {"role": "assistant", "content": first.outputs[0].text}, {"role": "user", "content": "Sure?"}]
    (second,) = llm.chat(more, GREEDY)
    assert second.num_cached_tokens >= len(first.prompt_token_ids) - 16


def test_the_last_message_can_be_continued(llm: LLM, oracle: AutoTokenizer) -> None:
    begun = [*CHAT, {"role": "assistant", "content": "They have"}]
    text = oracle.apply_chat_template(begun, tokenize=False, continue_final_message=True)
    ids = oracle.encode(text, add_special_tokens=False)
    (output,) = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt_token_ids == ids
    assert text.endswith("They have")
    with pytest.raises(InvalidRequest, match="set add_generation_prompt to false"):
        llm.chat(begun, GREEDY, continue_final_message=True)


def test_another_template_with_its_own_variables(sensitive: Path, oracle: AutoTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ tone }}:{% for message in messages %}{{ message.content }}{% endfor %}")
    llm = LLM(sensitive, chat_template=str(path), max_total_tokens=512, max_model_len=256)
    (output,) = llm.chat([{"role": "user", "content": "Hens"}], GREEDY, chat_template_kwargs={"tone": "kind"})
    assert output.prompt_token_ids == oracle.encode("kind:Hens", add_special_tokens=False)


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([], r"messages is \[\]"),
        ("hello", "messages is 'hello'"),
        ([[]], r"a conversation is \[\]"),
        (["hello"], "a conversation is 'hello'"),
        ([CHAT[0], "hello"], "a message is 'hello'"),
        ([{"content": "hello"}], r"messages\[0\].role must be a text"),
        ([{"role": "usr", "content": "hello"}], r"messages\[0\].role is 'usr'"),
        ([*CHAT, {"role": "user"}], r"messages\[2\].content is missing"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "of type .?image_url"),
    ],
)
def test_errors_name_the_wrong_conversation(llm: LLM, messages: object, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        llm.chat(messages, GREEDY)


def test_a_checkpoint_without_tokenizer_or_template_says_so(sensitive: Path, tmp_path: Path) -> None:
    save_llama(tmp_path)
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        LLM(str(tmp_path), max_total_tokens=256).chat(CHAT)
    (tmp_path / "tokenizer.json").write_bytes((sensitive / "tokenizer.json").read_bytes())
    with pytest.raises(InvalidRequest, match="no chat template"):
        LLM(str(tmp_path), max_total_tokens=256).chat(CHAT)


def test_another_tokenizer_can_be_used(llm: LLM, sensitive: Path, tmp_path: Path) -> None:
    save_llama(tmp_path)
    other = LLM(str(tmp_path), tokenizer=str(sensitive), max_total_tokens=256)
    assert other.chat_prompt(CHAT) == llm.chat_prompt(CHAT)


@pytest.mark.parametrize("kwargs", [3, {"messages": []}, {"add_generation_prompt": False}])
def test_wrong_template_kwargs_are_rejected(llm: LLM, kwargs: object) -> None:
    with pytest.raises(InvalidRequest, match="chat_template_kwargs is"):
        llm.chat(CHAT, GREEDY, chat_template_kwargs=kwargs)
