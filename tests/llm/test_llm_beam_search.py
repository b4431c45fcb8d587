"""``LLM.beam_search`` of the embedded model beside Transformers' ``generate`` with ``num_beams``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from radixkv import LLM, BeamSearchParams, SamplingParams
from radixkv.checkpoints import resolve
from radixkv.errors import ContextLengthExceeded, InvalidRequest, UnsupportedFeature
from radixkv.llm import BeamSearchSequence
from support.cases import rest_nightly

QUESTION = "What is 41 plus 11?"
PROMPTS = (QUESTION, "Once upon a time", "The cat")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", max_total_tokens=4096, max_model_len=512, page_size=4) as llm:
        yield llm


class Oracle:
    def __init__(self) -> None:
        checkpoint = resolve("tiny")
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32)
        self.model.generation_config = GenerationConfig()  # its end tokens would count also where there are none
        self.eos = sorted(checkpoint.eos_token_ids)

    def search(self, prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
        """Returns the answers and their scores, the best first."""
        ids = torch.tensor([prompt])
        config = GenerationConfig(
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            do_sample=False,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            eos_token_id=None if params.ignore_eos else self.eos,
            pad_token_id=self.eos[0],
            return_dict_in_generate=True,
            output_scores=True,
        )
        found = self.model.generate(ids, generation_config=config, attention_mask=torch.ones_like(ids))
        answers = [self._cut(row[len(prompt) :], params) for row in found.sequences.tolist()]
        if params.beam_width == 1:  # greedy: Transformers gives no score
            logprobs = torch.stack(found.scores).log_softmax(-1)[:, 0]
            total = sum(logprobs[i, token].item() for i, token in enumerate(answers[0]))
            return [(answers[0], total / len(answers[0]) ** params.length_penalty)]
        return list(zip(answers, found.sequences_scores.tolist(), strict=True))

    def _cut(self, tokens: list[int], params: BeamSearchParams) -> list[int]:
        ends = [] if params.ignore_eos else [index for index, token in enumerate(tokens) if token in self.eos]
        return tokens[: ends[0] + 1] if ends else tokens


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def answers(
    llm: LLM, params: BeamSearchParams, prompts: tuple[str, ...] = PROMPTS
) -> list[list[tuple[list[int], float]]]:
    """Returns for each prompt the answers and their scores."""
    outputs = llm.beam_search(prompts, params)
    lengths = [len(llm.generate(prompt, SamplingParams(max_tokens=1))[0].prompt_token_ids) for prompt in prompts]
    return [
        [
            (one.tokens[n:], one.cum_logprob / len(one.tokens[n:]) ** params.length_penalty)
            for one in output.sequences
        ]
        for output, n in zip(outputs, lengths, strict=True)
    ]


def check(found: list[tuple[list[int], float]], expected: list[tuple[list[int], float]]) -> None:
    """Checks answers and scores. Answers whose scores differ less than twice the measured error may be swapped."""
    error = max(abs(score - other) for (_, score), (_, other) in zip(found, expected, strict=True))
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-4, abs=1e-4)
    scores = {tuple(tokens): score for tokens, score in expected}
    for (tokens, _), (theirs, score) in zip(found, expected, strict=True):
        assert tokens == theirs or abs(scores[tuple(tokens)] - score) <= 2 * error


@pytest.mark.parametrize(
    ("width", "length_penalty", "ignore_eos"),
    rest_nightly(
        [(1, 1.0, False), (2, 1.0, False), (3, 0.0, False), (4, 1.0, True), (5, -1.0, False), (8, 2.0, False)]
        + [(8, 0.0, False), (8, 0.6, False)],
        kept=(7,),
    ),
)
def test_the_beams_are_those_of_transformers(
    llm: LLM, oracle: Oracle, width: int, length_penalty: float, ignore_eos: bool
) -> None:
    params = BeamSearchParams(width, 16, length_penalty=length_penalty, ignore_eos=ignore_eos)
    for prompt, found in zip(PROMPTS, answers(llm, params), strict=True):
        (prompt_ids,) = (output.prompt_token_ids for output in llm.generate(prompt, SamplingParams(max_tokens=1)))
        check(found, oracle.search(prompt_ids, params))


def test_the_width_is_at_most_64(llm: LLM, oracle: Oracle) -> None:
    params = BeamSearchParams(64, 6)
    (found,) = answers(llm, params, (QUESTION,))
    prompt_ids = llm.generate(QUESTION, SamplingParams(max_tokens=1))[0].prompt_token_ids
    check(found, oracle.search(prompt_ids, params))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "settings",
    rest_nightly(
        [
            {"enable_prefix_caching": False},
            {"max_num_seqs": 2},
            {"max_total_tokens": 24, "max_model_len": 24, "max_num_batched_tokens": 16},
            {"max_total_tokens": 28, "max_model_len": 24, "host_memory_bytes": 1 << 24},
        ],
        kept=(2,),
    ),
    ids=["without the cache", "fewer rows than beams", "a pool for one beam", "a host tier"],
)
def test_every_engine_finds_the_same_beams(llm: LLM, settings: dict[str, Any]) -> None:
    params = BeamSearchParams(5, 10, length_penalty=0.5)
    other = LLM(device="cpu", **{"max_total_tokens": 4096, "max_model_len": 512, "page_size": 4, **settings})
    assert answers(other, params, PROMPTS[:2]) == answers(llm, params, PROMPTS[:2])
    metrics = other.get_metrics()
    assert metrics.n_pages_free + metrics.n_pages_evictable == metrics.n_pages
    other.shutdown()


def test_sequences_have_the_fields_of_vllm(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=24)
    (output,) = llm.beam_search(
        [{"prompt": QUESTION}], params, lora_request=None, use_tqdm=False, concurrency_limit=None
    )
    first, second = output.sequences
    assert isinstance(first, BeamSearchSequence)
    assert first.text is not None
    assert first.text.startswith(f"<|begin_of_text|>{QUESTION}")
    assert first.text.endswith("<|eot_id|>")
    assert (first.finish_reason, first.stop_reason) == ("stop", None)
    assert first.cum_logprob > second.cum_logprob


def test_sampling_params_may_ask_for_beams(llm: LLM) -> None:
    (output,) = llm.generate(QUESTION, SamplingParams(n=3, use_beam_search=True, max_tokens=24, temperature=0.7))
    (expected,) = llm.beam_search(QUESTION, BeamSearchParams(3, 24))
    found = [output.prompt_token_ids + answer.token_ids for answer in output.outputs]
    assert found == [sequence.tokens for sequence in expected.sequences]
    assert [answer.cumulative_logprob for answer in output.outputs] == [
        sequence.cum_logprob for sequence in expected.sequences
    ]


@pytest.mark.parametrize("width", [0, 65, 2.5])
def test_a_wrong_width_is_refused(width: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"beam_width is .*; it must be") as error:
        BeamSearchParams(beam_width=width, max_tokens=4)
    assert error.value.param == "beam_width"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; it must be"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be"),
        ({"length_penalty": 1e9}, "length_penalty is .*; it must be"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.9},
        {"stop": ["a"]},
        {"logprobs": 1},
        {"presence_penalty": 1.0},
        {"structured_outputs": {"regex": "a"}},
    ],
)
def test_what_a_beam_search_does_not_take_is_refused_by_name(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(InvalidRequest, match=f"{name} is .* with use_beam_search") as error:
        SamplingParams(use_beam_search=True, **settings)
    assert error.value.param == name


def test_wrong_use_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="length_penalty is 2.0 without use_beam_search"):
        SamplingParams(length_penalty=2.0)
    with pytest.raises(InvalidRequest, match="a beam search is not streamed"):
        list(llm.stream("a", SamplingParams(use_beam_search=True)))
    with pytest.raises(InvalidRequest, match="give BeamSearchParams"):
        llm.beam_search("a", SamplingParams())
    with pytest.raises(UnsupportedFeature, match=r"use BeamSearchParams\(beam_width=\.\.\.\)"):
        llm.beam_search("a", beam_width=2)
    with pytest.raises(ContextLengthExceeded):
        llm.beam_search([[1] * 510], BeamSearchParams(2, 4))
