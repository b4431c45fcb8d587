"""The simulator says beforehand what the real engine finds, prompt by prompt."""

from __future__ import annotations

import json
from random import Random

import pytest

from radixkv import LLM, SamplingParams
from radixkv.errors import ContextLengthExceeded
from radixkv.simulator.concurrent_replay import Crowd
from radixkv.simulator.recording import read_recording
from radixkv.simulator.replay import Replay
from radixkv.simulator.traffic import TokenTraffic
from radixkv.wire import pack_tokens

PAGE_SIZE = 16


def traffic(seed, n_prompts):
    """Prompts of which many begin as others do, some of them whole and some cut off anywhere."""
    random = Random(seed)
    prompts = [[random.randrange(200) for _ in range(random.randrange(1, 90))]]
    while len(prompts) < n_prompts:
        old = random.choice(prompts[-8:])
        head = old[: random.choice([0, len(old), random.randrange(len(old) + 1), len(old) // 16 * 16])]
        prompts.append([*head, *(random.randrange(200) for _ in range(random.randrange(1, 60)))][:300])
        prompts += [random.choice(prompts)] * random.choice([0, 0, 1])
    return prompts


@pytest.mark.parametrize("n_pages", [8, 13, 40, 2000])
def test_it_finds_for_each_prompt_what_the_engine_reports(n_pages, tmp_path):
    prompts = traffic(seed=n_pages, n_prompts=60)
    llm = LLM("tiny", device="cpu", page_size=PAGE_SIZE, max_total_tokens=n_pages * PAGE_SIZE)
    one_token = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    reported = []
    for prompt in prompts:
        try:
            [output] = llm.generate([{"prompt_token_ids": prompt}], one_token, use_tqdm=False)
            reported.append(output.num_cached_tokens)
        except ContextLengthExceeded:
            reported.append(None)
    assert sum(filter(None, reported)) > 0
    assert (None in reported) == any(len(prompt) > n_pages * PAGE_SIZE for prompt in prompts)

    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts))
    recording = read_recording(file, page_size=PAGE_SIZE)
    replay = Replay(recording.traffic, n_pages, "lru")
    assert [replay.replay(index) for index in range(len(prompts))] == reported
    assert (replay.cache.n_evicted == 0) == (n_pages == 2000)


@pytest.mark.parametrize("n_pages", [22, 60, 400])
def test_with_all_in_flight_it_finds_what_the_engine_reports(n_pages):
    prompts = traffic(seed=100 + n_pages, n_prompts=90)
    llm = LLM("tiny", device="cpu", page_size=PAGE_SIZE, max_total_tokens=n_pages * PAGE_SIZE)
    one_token = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], one_token, use_tqdm=False)
    reported = [output.num_cached_tokens for output in outputs]
    recorded = TokenTraffic([pack_tokens(prompt) for prompt in prompts], PAGE_SIZE)
    together = Crowd(recorded, n_pages, len(prompts), 2048).run()
    assert together.n_cached_tokens == reported
    alone = Replay(recorded, n_pages, "lru").run()
    assert (sum(together.n_cached_tokens) > sum(alone.n_cached_tokens)) == (n_pages < 400)


def test_room_for_all_grows_with_the_prompts_and_not_with_the_clients():
    prompts = traffic(seed=7, n_prompts=40)
    recorded = TokenTraffic([pack_tokens(prompt) for prompt in prompts], PAGE_SIZE)
    most_pages = sum(len(prompt) // PAGE_SIZE + 2 for prompt in prompts)
    for concurrency in (3, 10_000, 10**12):
        crowd = Crowd(recorded, None, concurrency, 2048)
        assert crowd.cache.n_pages <= 2 * most_pages
        assert crowd.run().n_evicted_pages == 0


def test_conversations_become_the_prompts_that_a_chat_would_send(tmp_path):
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
    openai.write_text("\n".join(json.dumps({"id": 7, "messages": messages}) for messages in (first, second)))
    speakers = {"system": "system", "user": "human", "assistant": "gpt"}
    sharegpt.write_text(
        json.dumps(
            [
                {"conversations": [{"from": speakers[m["role"]], "value": m["content"]} for m in messages]}
                for messages in (first, second)
            ],
            indent=2,
        )
    )
    llm = LLM("tiny", device="cpu", page_size=PAGE_SIZE, max_total_tokens=4096)
    one_token = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    outputs = [llm.chat(asked, one_token, use_tqdm=False)[0] for asked in (first[:2], first[:4], second[:2])]
    for file in (openai, sharegpt):
        recording = read_recording(file, page_size=PAGE_SIZE, tokenizer="tiny")
        assert recording.traffic.n_tokens == [len(output.prompt_token_ids) for output in outputs]
        found = Replay(recording.traffic, 256, "lru").run().n_cached_tokens
        assert found == [output.num_cached_tokens for output in outputs]
        assert found[1] > 0
        assert found[2] > 0
