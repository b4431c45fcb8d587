"""The simulator predicts the cached tokens that the engine reports for each prompt."""

from __future__ import annotations

import json
import shutil
from random import Random
from types import SimpleNamespace

import pytest

from radixkv import LLM, SamplingParams
from radixkv.checkpoints import resolve_tokenizer
from radixkv.errors import ContextLengthExceeded
from radixkv.lab.simulator.answers import RecordedAnswers
from radixkv.lab.simulator.caches import CacheSettings
from radixkv.lab.simulator.concurrent_replay import ConcurrentReplay
from radixkv.lab.simulator.recording import read_recording
from radixkv.lab.simulator.replay import Replay
from radixkv.lab.simulator.traffic import TokenTraffic
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import pack_tokens, unpack_tokens
from support.cases import rest_nightly
from support.checkpoints import save_checkpoint
from support.device_support import HYBRIDS
from support.json_lines import write_lines

PAGE_SIZE = 16
OVERLAPPING = {"speculative_config": "off"}
"""Plans are made while a step is computed, as in the replay; with drafts the CPU takes turns with the host."""
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def random_prompts(seed, n_prompts):
    """Returns random prompts; many start with all or part of an earlier prompt."""
    random = Random(seed)
    prompts = [[random.randrange(200) for _ in range(random.randrange(1, 90))]]
    while len(prompts) < n_prompts:
        old = random.choice(prompts[-8:])
        head = old[: random.choice([0, len(old), random.randrange(len(old) + 1), len(old) // 16 * 16])]
        prompts.append([*head, *(random.randrange(200) for _ in range(random.randrange(1, 60)))][:300])
        prompts += [random.choice(prompts)] * random.choice([0, 0, 1])
    return prompts


@pytest.mark.nightly
@pytest.mark.parametrize("n_pages", rest_nightly([8, 13, 40, 2000], kept=(1,)))
def test_cached_tokens_equal_those_of_the_engine(n_pages, tmp_path):
    prompts = random_prompts(seed=n_pages, n_prompts=60)
    llm = LLM("tiny", device="cpu", page_size=PAGE_SIZE, max_total_tokens=n_pages * PAGE_SIZE, **OVERLAPPING)
    reported = []
    for prompt in prompts:
        try:
            [output] = llm.generate([{"prompt_token_ids": prompt}], ONE_TOKEN, use_tqdm=False)
            reported.append(output.num_cached_tokens)
        except ContextLengthExceeded:
            reported.append(None)
    assert sum(filter(None, reported)) > 0
    assert (None in reported) == any(len(prompt) > n_pages * PAGE_SIZE for prompt in prompts)

    file = write_lines(tmp_path / "requests.jsonl", *({"prompt_token_ids": prompt} for prompt in prompts))
    recording = read_recording(file, page_size=PAGE_SIZE)
    replay = Replay(recording.traffic, CacheSettings(n_pages))
    assert [replay.replay(index) for index in range(len(prompts))] == reported
    assert (replay.cache.n_evicted == 0) == (n_pages == 2000)


@pytest.mark.nightly
@pytest.mark.parametrize("n_pages", [22, 60, 400])
def test_with_all_requests_in_flight_cached_tokens_equal_those_of_the_engine(n_pages):
    prompts = random_prompts(seed=100 + n_pages, n_prompts=90)
    llm = LLM("tiny", device="cpu", page_size=PAGE_SIZE, max_total_tokens=n_pages * PAGE_SIZE, **OVERLAPPING)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], ONE_TOKEN, use_tqdm=False)
    reported = [output.num_cached_tokens for output in outputs]
    token_traffic = TokenTraffic([pack_tokens(prompt) for prompt in prompts], PAGE_SIZE)
    concurrent = ConcurrentReplay(token_traffic, CacheSettings(n_pages), len(prompts), 2048).run()
    assert concurrent.n_cached_tokens == reported
    one_at_a_time = Replay(token_traffic, CacheSettings(n_pages)).run()
    assert (sum(concurrent.n_cached_tokens) > sum(one_at_a_time.n_cached_tokens)) == (n_pages < 400)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    save_checkpoint(folder, **{**HYBRIDS["qwen3.5"], "eos_token_id": 2})
    return folder


def fan_outs(random, n_groups, n_children):
    """Returns the prompts of parents' children, which begin with what their parent has, in a random order."""
    prompts = []
    for _ in range(n_groups):
        prefix = [random.randrange(3, 200) for _ in range(random.randrange(200, 700))]
        tails = ([random.randrange(3, 200) for _ in range(random.randrange(1, 200))] for _ in range(n_children))
        prompts += [prefix + tail for tail in tails]
    random.shuffle(prompts)
    return prompts


@pytest.mark.nightly
@pytest.mark.parametrize("seed", rest_nightly([1, 2, 3], kept=(0,)))
def test_fan_outs_of_a_model_with_states_find_what_they_find_in_the_engine(hybrid, seed):
    """All prompts come at once. Each prefix is computed once, up to a block where the children leave each other."""
    prompts = fan_outs(Random(seed), n_groups=3, n_children=6)
    sizes = {"max_total_tokens": 2000 * PAGE_SIZE, "max_num_batched_tokens": 512, "max_num_seqs": len(prompts)}
    llm = LLM(str(hybrid), device="cpu", page_size=PAGE_SIZE, **sizes, **OVERLAPPING)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], ONE_TOKEN, use_tqdm=False)
    reported = [output.num_cached_tokens for output in outputs]
    n_states = llm.get_metrics().states.n_slots
    traffic = TokenTraffic([pack_tokens(prompt) for prompt in prompts], PAGE_SIZE)
    replay = ConcurrentReplay(traffic, CacheSettings(2000, n_states=n_states), len(prompts), 512).run()
    assert replay.n_cached_tokens == reported
    distinct = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    n_computed = sum(map(len, prompts)) - sum(reported)
    assert n_computed <= len(distinct) + 64 * len(prompts)
    assert sum(reported) > 3 * 5 * 100


@pytest.mark.parametrize(("n_pages", "n_sets"), rest_nightly([(40, 4), (90, 1), (600, 1)], kept=()))
def test_with_answers_cached_tokens_equal_those_of_the_engine(n_pages, n_sets):
    """Answers take pages from prompts, and what they leave is found: without them the replay is wrong.

    A replay that does not know their tokens is right in sum: in a small pool, one set of prompts is up to 4% off.
    """
    llm = LLM(
        "tiny",
        device="cpu",
        page_size=PAGE_SIZE,
        max_total_tokens=n_pages * PAGE_SIZE,
        **OVERLAPPING,
        max_num_seqs=64,
    )
    n_reported = n_of_lengths = 0
    for seed in range(200 + n_pages, 200 + n_pages + n_sets):
        llm.flush_cache()
        prompts, random = random_prompts(seed=seed, n_prompts=60), Random(1)
        lengths = [random.choice([1, 5, 40, 90]) for _ in prompts]
        sampling = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(asked, sampling, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
        reported = [output.num_cached_tokens for output in outputs]
        traffic = TokenTraffic([pack_tokens(prompt) for prompt in prompts], PAGE_SIZE)
        said = [pack_tokens(output.outputs[0].token_ids) for output in outputs]
        answers = SimpleNamespace(lengths=lengths, are_limited=True, symbols=said.__getitem__)
        settings = CacheSettings(n_pages)
        replayed = ConcurrentReplay(traffic, settings, 64, 2048, answers=answers).run()
        assert replayed.n_cached_tokens == reported
        of_lengths = ConcurrentReplay(
            traffic, CacheSettings(n_pages), 64, 2048, answers=RecordedAnswers(traffic, lengths, are_limited=True)
        ).run()
        n_reported += sum(reported)
        n_of_lengths += sum(of_lengths.n_cached_tokens)
        without = ConcurrentReplay(traffic, settings, 64, 2048).run()
        assert (without.n_cached_tokens != reported) == (n_pages < 600)
    assert n_of_lengths == pytest.approx(n_reported, rel=0.02), "without knowing the tokens"


@pytest.mark.nightly
def test_answers_that_a_token_ends_give_the_cached_tokens_of_the_engine():
    """Behind such a token the server has launched one more row, which takes its place in a step."""
    prompts, n_pages = random_prompts(seed=17, n_prompts=24), 40
    settings = {"page_size": PAGE_SIZE, "max_total_tokens": n_pages * PAGE_SIZE, "max_num_seqs": 64}
    llm = LLM("tiny", device="cpu", **settings, **OVERLAPPING)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    random = Random(1)
    long = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    said = [output.outputs[0].token_ids for output in llm.generate(asked, long, use_tqdm=False)]
    said = [list(tokens[: tokens.index(random.choice(tokens)) + 1]) for tokens in said]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=200, stop_token_ids=[tokens[-1]], ignore_eos=True)
        for tokens in said
    ]
    llm.flush_cache()
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop"] * len(prompts)
    traffic = TokenTraffic([pack_tokens(prompt) for prompt in prompts], PAGE_SIZE)
    answers = SimpleNamespace(
        lengths=list(map(len, said)),
        are_limited=False,
        symbols=lambda index: pack_tokens(said[index]),
    )
    replayed = ConcurrentReplay(traffic, CacheSettings(n_pages), 64, 2048, answers=answers).run()
    assert replayed.n_cached_tokens == [output.num_cached_tokens for output in outputs]


def test_an_answer_that_a_later_prompt_sends_back_is_found_there():
    said = [list(range(100, 150)), list(range(200, 240)), list(range(300, 330))]
    first, second = said[0], [*said[0], *said[1], *said[2]]
    traffic = TokenTraffic([pack_tokens(prompt) for prompt in (first, second, first)], PAGE_SIZE)
    answers = RecordedAnswers(traffic, [40, 5, 60])
    assert answers.symbols(0) == pack_tokens(said[1])
    new = [unpack_tokens(answers.symbols(index)) for index in (1, 2)]
    assert [len(tokens) for tokens in new] == [5, 60]
    assert not set(new[0]) & set(new[1]) | set(second) & {*new[0], *new[1]}
    replay = ConcurrentReplay(traffic, CacheSettings(100), 1, 2048, answers=answers).run()
    assert replay.n_cached_tokens[1] >= 80, "the first prompt and its answer, in whole pages"
    assert ConcurrentReplay(traffic, CacheSettings(100), 1, 2048).run().n_cached_tokens[1] < 64


def test_an_infinite_pool_grows_with_the_prompts_and_not_with_the_clients():
    prompts = random_prompts(seed=7, n_prompts=40)
    token_traffic = TokenTraffic([pack_tokens(prompt) for prompt in prompts], PAGE_SIZE)
    max_pages = sum(len(prompt) // PAGE_SIZE + 2 for prompt in prompts)
    for concurrency in (3, 10_000, 10**12):
        replay = ConcurrentReplay(token_traffic, CacheSettings(None), concurrency, 2048)
        assert replay.cache.n_pages <= 2 * max_pages
        assert replay.run().n_evicted_pages == 0


def test_conversations_become_the_prompts_of_the_chat_api(tmp_path):
    system = {"role": "system", "content": "You are a careful assistant. Answer in one word, and never twice."}
    first = [
        system,
        {"role": "user", "content": "Say red."},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": "Now say blue."},
        {"role": "assistant", "content": "Blue."},
        {"role": "assistant", "content": "And that is that."},
        {"role": "user", "content": "Thank you."},
    ]
    second = [system, {"role": "user", "content": "Say red, please."}, {"role": "assistant", "content": "Red!"}]
    openai, sharegpt = tmp_path / "openai.jsonl", tmp_path / "sharegpt.json"
    write_lines(openai, *({"id": 7, "messages": messages} for messages in (first, second)))
    speakers = {"system": "system", "user": "human", "assistant": "gpt"}
    spoken = [
        {"conversations": [{"from": speakers[m["role"]], "value": m["content"]} for m in messages]}
        for messages in (first, second)
    ]
    sharegpt.write_text(json.dumps(spoken, indent=2))
    llm = LLM("tiny", device="cpu", page_size=PAGE_SIZE, max_total_tokens=4096, **OVERLAPPING)
    outputs = [llm.chat(messages, ONE_TOKEN, use_tqdm=False)[0] for messages in (first[:2], first[:4], second[:2])]
    answered = write_lines(tmp_path / "answered.jsonl", {"messages": first[:-1]}, {"messages": second})
    for file, conversations in ((openai, True), (answered, False), (sharegpt, False)):
        recording = read_recording(file, page_size=PAGE_SIZE, tokenizer="tiny", conversations=conversations)
        assert recording.traffic.n_tokens == [len(output.prompt_token_ids) for output in outputs]
        n_cached_tokens = Replay(recording.traffic, CacheSettings(256)).run().n_cached_tokens
        assert n_cached_tokens == [output.num_cached_tokens for output in outputs]
        assert n_cached_tokens[1] > 0
        assert n_cached_tokens[2] > 0


SAID = [
    {"role": "system", "content": "You are a patient teacher of mathematics who answers in short steps."},
    {"role": "user", "content": "What is 41 plus 11?"},
    {"role": "assistant", "content": "41 plus 11 is 52."},
    {"role": "user", "content": "And what is 52 minus 20, written as a number and as a word?"},
    {"role": "assistant", "content": "32, thirty-two."},
    {"role": "user", "content": "Say it again in a whole sentence, please."},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "say", "arguments": "{}"}}]},
    {"role": "tool", "content": "said"},
]


def test_each_line_of_a_log_is_one_request(tmp_path):
    lines = [{"model": "m", "messages": SAID[:end], "temperature": 0} for end in (2, 4, 6, 8)]
    ids = list(range(3, 40))
    lines += [{"prompt": "41 plus 11 is"}, {"prompt": ids}, {"prompt": [ids, [5, 6]]}, {"messages": SAID[1:2]}]
    lines += [{"messages": SAID[:3], "continue_final_message": True}]
    log = write_lines(tmp_path / "requests.jsonl", *lines)
    llm = LLM("tiny", device="cpu", page_size=PAGE_SIZE, max_total_tokens=4096, **OVERLAPPING)
    prompts = [llm.chat_prompt(SAID[:end]) for end in (2, 4, 6, 8)]
    prompts += ["41 plus 11 is", ids, ids, [5, 6], llm.chat_prompt(SAID[1:2])]
    prompts += [llm.chat_prompt(SAID[:3], add_generation_prompt=False, continue_final_message=True)]
    outputs = [llm.generate(prompt, ONE_TOKEN, use_tqdm=False)[0] for prompt in prompts]
    recording = read_recording(log, page_size=PAGE_SIZE, tokenizer="tiny")
    assert recording.traffic.n_tokens == [len(output.prompt_token_ids) for output in outputs]
    n_cached_tokens = Replay(recording.traffic, CacheSettings(256)).run().n_cached_tokens
    assert n_cached_tokens == [output.num_cached_tokens for output in outputs]
    assert all(n_cached_tokens[index] > 0 for index in (1, 2, 3, 6))


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, ""),
        ({"reasoning_effort": None}, ""),
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
    ],
)
def test_variables_of_a_logged_request_reach_the_template(tmp_path, fields, effort):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_tokenizer("tiny") / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ tools | length }} {{ adds_special_tokens }} {{ reasoning_effort }} {{ messages[0].content }}"
    )
    log = tmp_path / "requests.jsonl"
    variables = {"adds_special_tokens": "all"} | fields.get("chat_template_kwargs", {})
    chat = {"messages": SAID[1:2], "tools": [{}, {}, {}], **fields, "chat_template_kwargs": variables}
    log.write_text(json.dumps(chat))
    recording = read_recording(log, tokenizer=str(tmp_path))
    expected = Tokenizer.load(tmp_path).encode(f"3 all {effort} What is 41 plus 11?", adds_special_tokens=False)
    assert recording.traffic.symbols(0) == expected
