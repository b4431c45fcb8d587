"""Tests of ``SamplingParams`` through ``LLM``, against Transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from radixkv.llm import LLM, Logprob, RequestOutput
from radixkv.wire.sampling import SamplingParams

TEXT = "A farmer has 12 hens, and each of them lays 5 eggs a week. How many eggs does he get in a month?"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
END_OF_TURN = 4095
HEADER = 4094


class Oracle:
    """Computes logprobs with Transformers and the same checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Returns the logprobs of the token after each one: [len(ids), vocabulary]."""
        with torch.no_grad():
            return torch.log_softmax(self.model(torch.tensor([ids])).logits[0].float(), dim=-1)

    def check(self, found: dict[int, Logprob], token: int, expected: torch.Tensor, n_likeliest: int) -> None:
        assert next(iter(found)) == token
        likeliest = expected.topk(n_likeliest).indices.tolist() if n_likeliest else []
        assert set(found) == {token, *likeliest}
        for token_id, entry in found.items():
            assert entry.logprob == pytest.approx(expected[token_id].item(), abs=1e-4)
            assert entry.rank == (expected > expected[token_id]).sum().item() + 1
            assert entry.decoded_token == self.tokenizer.decode([token_id])


@pytest.fixture(scope="module")
def oracle(sensitive: Path) -> Oracle:
    return Oracle(sensitive)


def test_logprobs_are_those_of_the_unchanged_logits(llm: LLM, oracle: Oracle) -> None:
    settings = SamplingParams(
        seed=3,
        max_tokens=8,
        ignore_eos=True,
        logprobs=4,
        temperature=2.5,
        presence_penalty=1.5,
        repetition_penalty=1.3,
        logit_bias={17: 3.0},
    )
    (output,) = llm.generate(TEXT, settings)
    (answer,) = output.outputs
    expected = oracle.logprobs(output.prompt_token_ids + answer.token_ids)
    n_prompt = len(output.prompt_token_ids)
    assert len(answer.logprobs) == 8
    for position, (token, found) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        oracle.check(found, token, expected[n_prompt - 1 + position], 4)
    own = [found[token].logprob for token, found in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(own))


def test_no_logprobs_unless_they_are_asked_for(llm: LLM) -> None:
    (output,) = llm.generate(TEXT, GREEDY)
    assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None, None)
    assert output.prompt_logprobs is None
    (output,) = llm.generate(TEXT, SamplingParams(temperature=0.0, max_tokens=3, logprobs=0))
    assert [list(found) for found in output.outputs[0].logprobs] == [[t] for t in output.outputs[0].token_ids]


def test_requests_with_prompt_logprobs_do_not_read_the_cache_but_fill_it(llm: LLM, oracle: Oracle) -> None:
    llm.flush_cache()
    settings = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2)
    cold, warm = (llm.generate(TEXT, settings)[0] for _ in range(2))
    (plain,) = llm.generate(TEXT, GREEDY)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 0)
    assert plain.num_cached_tokens > 0
    assert warm.prompt_logprobs == cold.prompt_logprobs
    first, *rest = cold.prompt_logprobs
    assert first is None
    expected = oracle.logprobs(cold.prompt_token_ids)
    assert len(rest) == len(cold.prompt_token_ids) - 1
    for position, found in enumerate(rest):
        oracle.check(found, cold.prompt_token_ids[position + 1], expected[position], 2)


def answers(output: RequestOutput) -> list[tuple[str, list[int]]]:
    return [(answer.text, answer.token_ids) for answer in output.outputs]


def test_each_of_n_answers_equals_a_single_one_with_its_seed(llm: LLM) -> None:
    llm.flush_cache()
    (several,) = llm.generate(TEXT, SamplingParams(n=4, seed=7, max_tokens=20, ignore_eos=True, logprobs=1))
    assert [answer.index for answer in several.outputs] == [0, 1, 2, 3]
    assert several.num_cached_tokens == 0
    alone = [
        llm.generate(TEXT, SamplingParams(seed=7 + i, max_tokens=20, ignore_eos=True, logprobs=1))[0]
        for i in range(4)
    ]
    assert answers(several) == [answers(one)[0] for one in alone]
    assert [a.logprobs for a in several.outputs] == [one.outputs[0].logprobs for one in alone]
    assert len({answer.text for answer in several.outputs}) == 4


def test_a_stop_string_ends_one_of_n_answers_and_no_other(llm: LLM) -> None:
    settings = {"n": 3, "seed": 11, "max_tokens": 24, "ignore_eos": True}
    (whole,) = llm.generate(TEXT, SamplingParams(**settings))
    texts = [answer.text for answer in whole.outputs]
    stop = next(
        texts[1][at : at + 4] for at in range(8, 80) if not any(texts[1][at : at + 4] in t for t in texts[::2])
    )
    (stopped,) = llm.generate(TEXT, SamplingParams(**settings, stop=(stop,)))
    assert [answer.text for answer in stopped.outputs] == [texts[0], texts[1].split(stop)[0], texts[2]]
    assert [answer.finish_reason for answer in stopped.outputs] == ["length", "stop", "length"]
    assert [answer.stop_reason for answer in stopped.outputs] == [None, stop, None]
    assert llm.get_metrics().n_running == 0


def test_the_stop_string_is_in_the_text_if_that_is_asked_for(llm: LLM) -> None:
    (whole,) = llm.generate(TEXT, GREEDY)
    text = whole.outputs[0].text
    stop = text[10:13]
    (stopped,) = llm.generate(
        TEXT,
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=stop, include_stop_str_in_output=True),
    )
    assert stopped.outputs[0].text == text[: text.index(stop)] + stop


def test_the_stop_reason_is_what_ended_the_answer(llm: LLM) -> None:
    force = {"temperature": 0.0, "max_tokens": 6, "logit_bias": {END_OF_TURN: 100.0}}
    by_eos, by_id = llm.generate([TEXT] * 2, [SamplingParams(**force), SamplingParams(**force, stop_token_ids=[9])])
    assert (by_eos.outputs[0].finish_reason, by_eos.outputs[0].stop_reason) == ("stop", None)
    assert by_eos.outputs[0].token_ids == [END_OF_TURN]
    assert by_id.outputs[0].stop_reason is None
    asked = SamplingParams(temperature=0.0, max_tokens=6, logit_bias={900: 100.0}, stop_token_ids=[900])
    (output,) = llm.generate(TEXT, asked)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", 900)
    assert (output.outputs[0].token_ids, output.outputs[0].text) == ([900], "")


def test_no_answer_ends_before_min_tokens(llm: LLM) -> None:
    force = {"temperature": 0.0, "max_tokens": 9, "logit_bias": {END_OF_TURN: 100.0}}
    (output,) = llm.generate(TEXT, SamplingParams(**force, min_tokens=5))
    assert END_OF_TURN not in output.outputs[0].token_ids[:5]
    assert output.outputs[0].token_ids[5:] == [END_OF_TURN]
    (whole,) = llm.generate(TEXT, GREEDY)
    stop = whole.outputs[0].text[:2]
    (late,) = llm.generate(
        TEXT, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=stop, min_tokens=8)
    )
    assert late.outputs[0].token_ids[:8] == whole.outputs[0].token_ids[:8]


def test_special_tokens_are_in_the_text_if_that_is_asked_for(llm: LLM) -> None:
    force = {"temperature": 0.0, "max_tokens": 2, "logit_bias": {HEADER: 100.0}}
    (hidden,) = llm.generate(TEXT, SamplingParams(**force))
    (shown,) = llm.generate(TEXT, SamplingParams(**force, skip_special_tokens=False))
    assert (hidden.outputs[0].text, hidden.outputs[0].token_ids) == ("", [HEADER] * 2)
    assert shown.outputs[0].text == "<|end_header_id|>" * 2


def test_the_checkpoints_defaults_are_used_where_no_settings_are_given(sensitive: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sensitive, tmp_path / "model")
    generation = json.loads((folder / "generation_config.json").read_text())
    generation |= {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "max_new_tokens": 7}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    llm = LLM(str(folder), max_total_tokens=1024, max_model_len=512)
    defaults = llm.get_default_sampling_params()
    assert defaults == SamplingParams(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1, max_tokens=7)
    (output,) = llm.generate(TEXT)
    assert len(output.outputs[0].token_ids) <= 7
    again = LLM(str(folder), max_total_tokens=1024, max_model_len=512)
    assert again.generate(TEXT, defaults)[0].outputs == output.outputs  # the same engine seed
    assert SamplingParams().temperature == 1.0
