"""``LLM`` with drafts gives what it gives without them, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from radixkv import LLM, SamplingParams, StructuredOutputs
from radixkv.errors import ConfigError
from radixkv.runtime.drafts.search_pauses import SearchPauses
from radixkv.runtime.drafts.step_costs import StepCosts
from support.cases import rest_nightly
from support.json_schemas import closed

LINES = "".join(f"- item {n}: pears, plums, and {n} figs;\n" for n in range(6))
PROMPTS = [
    "The list is:\n" + LINES + "Once more, the list is:\n",
    LINES + LINES + "- item",
    "Something that does not repeat itself, to be short.",
    [7, 8, 9] * 12,
]
ENGINES = ["sensitive-ngram", "tiny-tree", "tiny-ngram"]
"""Model and method; answers of the first model depend on every KV page."""


@pytest.fixture(autouse=True)
def every_draft_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the number of drafts independent of measured times, which a busy machine stretches."""
    monkeypatch.setattr(SearchPauses, "skips_step", lambda self: False)
    monkeypatch.setattr(StepCosts, "seconds", lambda self, n_rows, waits: 1.0)


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest, sensitive: Path) -> Iterator[tuple[LLM, LLM]]:
    """An engine without drafts, and one with them."""
    name, method = request.param.split("-")
    model = "tiny" if name == "tiny" else sensitive
    sizes: Any = {"max_total_tokens": 4096, "max_model_len": 1024}
    config = {"method": method, "num_speculative_tokens": 6}
    with (
        LLM(model, speculative_config="off", **sizes) as plain,
        LLM(model, speculative_config=config, **sizes) as drafting,
    ):
        yield plain, drafting


NARROW = {7: 90.0, 8: 90.0, 9: 90.0}
"""Biases by which a random model answers with three tokens, so that drafts are right, wrong, or go wrong."""


def answers(llm: LLM, params: SamplingParams, prompts: list[Any]) -> list[Any]:
    return [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.7, seed=5, max_tokens=24, logprobs=0),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=6, n=3, max_tokens=24),
    SamplingParams(temperature=0.0, max_tokens=24, min_tokens=16, stop=["figs", "\n\n"]),
    SamplingParams(temperature=0.0, max_tokens=24, logit_bias={7: 3.0, 8: -2.0}),
    SamplingParams(temperature=0.0, max_tokens=24, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, max_tokens=24, prompt_logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=1),
]


@pytest.mark.parametrize(
    ("engines", "params"),
    rest_nightly(product(ENGINES, PARAMS), kept=(2,)),
    indirect=["engines"],
    scope="module",
)
def test_answers_are_equal_to_the_bit(engines: tuple[LLM, LLM], params: SamplingParams) -> None:
    plain, drafting = engines
    for engine in engines:
        engine.flush_cache()
    before = count_drafts(drafting)
    biased = [replace(params, logit_bias=bias) for bias in (params.logit_bias, NARROW)]
    expected = [answers(plain, one, PROMPTS) for one in biased]
    for _ in range(2):  # without hits, then with hits
        assert [answers(drafting, one, PROMPTS) for one in biased] == expected
    n_drafted, n_accepted = (now - then for now, then in zip(count_drafts(drafting), before, strict=True))
    if params.max_tokens > 1 and not params.frequency_penalty:
        assert 0 < n_accepted < n_drafted


ITEM = closed(item={"enum": ["pears", "plums", "figs"]}, n={"type": "integer", "maximum": 99, "minimum": 0})
LIST = {"type": "array", "items": ITEM, "minItems": 3, "maxItems": 6}
RECORD = closed(
    family_name={"enum": ["Li", "Lopez"]}, date_of_birth={"type": "integer"}, is_a_member={"type": "boolean"}
)
REASONED = [
    {"type": "regex", "pattern": "[a-c ]{3,9}</think>"},
    {"type": "json_schema", "json_schema": RECORD, "is_one_line": True},
]
LATE = {"type": "structural_tag", "format": {"type": "sequence", "elements": REASONED}}
"""A record that comes after some reasoning."""
JSON_PROMPTS = [
    'Items: [{"item": "pears", "n": 7}, {"item": "plums", "n": 7}, {"item": "figs", "n": 7}]\nItems: ',
    "Say abcabcabcabc, and then abc: abc",
    [7, 8, 9] * 12,
]


CONSTRAINED = [
    ({"json": LIST}, SamplingParams(temperature=0.0, max_tokens=24, logprobs=3)),
    ({"json": LIST}, SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=24, logprobs=0)),
    ({"json_object": True}, SamplingParams(temperature=0.0, max_tokens=24, min_tokens=12, stop=["figs", "}}"])),
    ({"choice": ["abcabcabc", "abc", "figs"]}, SamplingParams(temperature=0.7, seed=6, ignore_eos=True)),
    ({"regex": "([a-c ]{3}){4,20}"}, SamplingParams(temperature=1.0, top_k=8, seed=7, n=3, max_tokens=24)),
]
FORCED = [
    ({"json": RECORD}, SamplingParams(temperature=1.0, seed=8, n=3, max_tokens=60, logprobs=1)),
    ({"json": RECORD}, SamplingParams(temperature=0.0, max_tokens=60, min_tokens=30, stop=["of_birth", "}"])),
    ({"structural_tag": LATE}, SamplingParams(temperature=1.0, seed=9, n=2, max_tokens=40, logprobs=0)),
]


@pytest.mark.parametrize(
    ("engines", "constrained"),
    rest_nightly(
        [*product(ENGINES[:1], CONSTRAINED), *product(ENGINES[1:2], FORCED), *product(ENGINES[1:], CONSTRAINED)],
        kept=(8,),
    ),
    indirect=["engines"],
    scope="module",
)
def test_answers_that_obey_a_grammar_are_equal_to_the_bit(
    engines: tuple[LLM, LLM], constrained: tuple[dict[str, Any], SamplingParams]
) -> None:
    plain, drafting = engines
    wanted, params = constrained
    for engine in engines:
        engine.flush_cache()
    before = count_drafts(drafting)
    free = replace(params, structured_outputs=StructuredOutputs(**wanted))
    narrow = replace(free, logit_bias=NARROW)
    expected = answers(plain, free, JSON_PROMPTS)
    assert answers(drafting, free, JSON_PROMPTS) == expected
    assert answers(drafting, narrow, JSON_PROMPTS) == answers(plain, narrow, JSON_PROMPTS)
    assert answers(drafting, free, JSON_PROMPTS) == expected, "with hits"
    n_drafted, n_accepted = (now - then for now, then in zip(count_drafts(drafting), before, strict=True))
    if wanted.get("json") is LIST:
        assert 0 < n_accepted < n_drafted


def count_drafts(llm: LLM) -> tuple[int, int]:
    drafts = llm.get_metrics().drafts
    assert drafts is not None
    return drafts.draft_tokens_total, drafts.accepted_tokens_total


@pytest.mark.nightly
@pytest.mark.parametrize("engines", rest_nightly(ENGINES, kept=(1,)), indirect=True)
def test_a_text_that_repeats_itself_takes_fewer_steps(engines: tuple[LLM, LLM]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True, logit_bias={7: 90.0})
    n_steps = []
    for engine in engines:
        before = engine.get_metrics().steps_total
        answers(engine, params, PROMPTS[:1])
        n_steps.append(engine.get_metrics().steps_total - before)
    assert n_steps[0] == 120
    assert n_steps[1] < 40
    assert engines[0].get_metrics().drafts is None


@pytest.fixture
def tree_engine(engines: tuple[LLM, LLM]) -> LLM:
    engines[1].flush_cache()
    return engines[1]


with_tree = pytest.mark.parametrize("engines", ["tiny-tree"], indirect=True, scope="module")


def answer_in_steps(llm: LLM, prompt: object) -> tuple[str, int]:
    """Returns an answer of 60 tokens, and how many steps it takes."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    before = llm.get_metrics().steps_total
    ((answer,),) = answers(llm, params, [prompt])
    return answer.text, llm.get_metrics().steps_total - before


@with_tree
def test_an_answer_that_was_given_before_takes_fewer_steps_in_its_namespace(tree_engine: LLM) -> None:
    prompt = "A story of a lighthouse keeper and"
    text, n_first = answer_in_steps(tree_engine, prompt)
    again, n_again = answer_in_steps(tree_engine, prompt)
    assert again == text
    assert n_first > 40
    assert n_again < 20
    _, n_elsewhere = answer_in_steps(tree_engine, {"prompt": prompt, "cache_salt": "a"})
    assert n_elsewhere > 40, "what one namespace has seen shows in no other"
    tree_engine.flush_cache()
    _, n_flushed = answer_in_steps(tree_engine, prompt)
    assert n_flushed > 40


@pytest.mark.nightly
@with_tree
def test_a_part_of_an_answer_to_another_prompt_is_drafted_in_its_namespace(tree_engine: LLM) -> None:
    prompt = "A story of a lighthouse keeper and"
    text, _ = answer_in_steps(tree_engine, prompt)
    other = "Hm. " + prompt + text[:60]
    _, n_elsewhere = answer_in_steps(tree_engine, {"prompt": other, "cache_salt": "b"})
    _, n_here = answer_in_steps(tree_engine, other)
    assert n_here < 0.8 * n_elsewhere


@with_tree
def test_a_first_answer_to_a_schema_takes_fewer_steps(tree_engine: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=90, structured_outputs=StructuredOutputs(json=RECORD))
    before = tree_engine.get_metrics()
    ((answer,),) = answers(tree_engine, params, ["Who?"])
    after, n_tokens = tree_engine.get_metrics(), len(answer.token_ids)
    assert after.steps_total - before.steps_total < 0.5 * n_tokens
    assert after.drafts is not None
    assert after.drafts.by_source["grammar"].accepted_tokens_total > 0.5 * n_tokens


def test_what_is_no_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="speculative_config 'x' is neither a JSON object nor off"):
        LLM(speculative_config="x")  # type: ignore[arg-type]
