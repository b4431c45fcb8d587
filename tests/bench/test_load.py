import asyncio
import itertools
import math
import re
import socket

import pytest
from fake_openai import output_ids, output_text

from radixkv.bench.load import Load, LoadGenerator
from radixkv.errors import ConfigError


def send(address, prompts, **settings):
    """Each prompt, or tuple of turns, is a session."""
    sessions = [(prompt,) if isinstance(prompt, str) else prompt for prompt in prompts]
    load = Load(**{"model": "fake-model", "output_len": 4, "max_concurrency": 8, **settings})

    async def go():
        async with LoadGenerator(address) as generator:
            return await generator.run(sessions, load)

    return asyncio.run(go())


def ask(address, question):
    async def go():
        async with LoadGenerator(address) as generator:
            return await question(generator)

    return asyncio.run(go())


@pytest.mark.parametrize("odd_bytes", [False, True])
def test_a_record_holds_what_streamed(fake, odd_bytes):
    fake.odd_bytes = odd_bytes
    prompts = ["alpha beta", "alpha gamma", "delta"]
    measurement = send(fake.address, prompts, max_concurrency=1)
    for prompt, record in zip(prompts, measurement.records, strict=True):
        assert record.error is None
        assert record.token_ids == output_ids(prompt, 4)
        assert record.text == "".join(map(output_text, record.token_ids))
        assert record.prompt_token_ids == list(prompt.encode())
        assert (record.n_prompt_tokens, record.n_output_tokens) == (len(prompt), 4)
        assert len(record.arrivals) == 4
        assert 0 < record.ttft <= record.latency <= measurement.duration
    assert [record.n_cached_tokens for record in measurement.records] == [0, len("alpha "), 0]


def test_the_request_asks_for_a_greedy_answer_of_a_fixed_length(fake):
    send(fake.address + "/v1/", ["one"])
    body = fake.bodies[0]
    assert body == {
        "model": "fake-model",
        "prompt": "one",
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def test_times_are_those_of_the_server(fake):
    fake.delay = 0.05
    [record] = send(fake.address, ["one"]).records
    assert len(record.itl) == 3
    assert record.latency - record.ttft == pytest.approx(sum(record.itl))
    assert record.tpot == pytest.approx(sum(record.itl) / 3)
    assert all(gap > 0.02 for gap in record.itl)


@pytest.mark.parametrize("ends_apart", [False, True])
@pytest.mark.parametrize("empty_events", [0, 2])
@pytest.mark.parametrize("returns_ids", [False, True])
def test_only_events_with_output_are_arrivals(fake, ends_apart, empty_events, returns_ids):
    fake.ends_apart, fake.empty_events, fake.returns_ids = ends_apart, empty_events, returns_ids
    fake.delay = 0.02
    [record] = send(fake.address, ["one"]).records
    assert record.error is None
    assert len(record.arrivals) == 4
    assert all(gap > 0.01 for gap in record.itl)
    assert record.text == "".join(map(output_text, output_ids("one", 4)))


def test_no_more_requests_are_in_flight_than_allowed(fake):
    fake.delay = 0.005
    send(fake.address, [f"prompt {n}" for n in range(12)], max_concurrency=3)
    assert fake.most_in_flight == 3
    assert {body["prompt"] for body in fake.bodies[:3]} == {"prompt 0", "prompt 1", "prompt 2"}


def test_a_turn_has_all_that_was_said_and_waits_for_the_answer(fake):
    fake.delay = 0.01
    sessions = [("one:", " two:", " three:"), ("uno:", " due:")]
    first, second, third, uno, due = send(fake.address, sessions).records
    assert [record.error for record in (first, second, third, uno, due)] == [None] * 5
    prompts = [body["prompt"] for body in fake.bodies]
    assert set(prompts[:2]) == {"one:", "uno:"}
    assert f"one:{first.text} two:" in prompts
    assert f"one:{first.text} two:{second.text} three:" in prompts
    assert f"uno:{uno.text} due:" in prompts
    for before, after in ((first, second), (second, third), (uno, due)):
        assert after.started >= before.started + before.latency
    assert uno.started < first.started + first.latency  # sessions do not wait for each other


def test_a_turn_that_fails_ends_its_session_and_no_other(fake):
    fake.fault = "http_500"
    sessions = [("one", "FAULT", "never"), ("uno", "due", "tre")]
    records = send(fake.address, sessions).records
    assert [record.error is None for record in records] == [True, False, False, True, True, True]
    assert "500" in records[1].error
    assert records[2].error == "not sent: the turn before it failed"
    assert not any("never" in body["prompt"] for body in fake.bodies)


def test_no_more_turns_are_in_flight_than_allowed(fake):
    fake.delay = 0.005
    send(fake.address, [(f"{n}", "a", "b") for n in range(8)], max_concurrency=3)
    assert fake.most_in_flight == 3


def test_a_key_goes_with_every_request(fake):
    fake.key = "secret"

    async def go(key):
        async with LoadGenerator(fake.address, api_key=key) as generator:
            load = Load(model=await generator.model(), output_len=2, max_concurrency=1)
            return await generator.flush(), await generator.run([("one",)], load)

    flushed, measurement = asyncio.run(go("secret"))
    assert flushed
    assert measurement.records[0].error is None
    with pytest.raises(ConfigError, match="401"):
        asyncio.run(go(None))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("http_500", "HTTP status 500: .*it broke"),
        ("no_done", r"ended without \[DONE\]"),
        ("error_event", "the server reported .*the runtime died"),
        ("no_usage", "brought no usage"),
        ("not_json", "not a completion chunk"),
        ("cut", "RemoteProtocolError"),
    ],
)
def test_a_failed_request_is_noted_and_the_others_go_on(fake, fault, reason):
    fake.fault = fault
    records = send(fake.address, ["one", "FAULT", "two"]).records
    assert [record.error is None for record in records] == [True, False, True]
    assert re.search(reason, records[1].error)


def test_a_server_that_is_not_there_fails_every_request_and_hangs_none():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        records = send(address, ["one", "two"]).records
        assert all("ConnectError" in record.error for record in records)
        with pytest.raises(ConfigError, match=r"/v1/models does not answer: ConnectError.*is the server running"):
            ask(address, lambda generator: generator.model())


def test_the_model_is_the_servers_first_one(fake):
    assert ask(fake.address, lambda generator: generator.model()) == "fake-model"
    with pytest.raises(ConfigError, match="404"):
        ask(fake.address + "/elsewhere", lambda generator: generator.model())
    with pytest.raises(ConfigError, match="'localhost:8000' is not an address"):
        LoadGenerator("localhost:8000")


def test_a_flush_says_whether_there_was_one(fake):
    assert ask(fake.address, lambda generator: generator.flush())
    fake.has_flush = False
    assert not ask(fake.address, lambda generator: generator.flush())
    assert fake.flushes == 1


def test_arrivals_are_poisson_with_the_rate_and_repeat_with_the_seed():
    load = Load(model="m", output_len=1, max_concurrency=1, request_rate=20.0, seed=5)
    times = list(load.arrivals(4001))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert sum(gap < mean * math.log(2) for gap in gaps) == pytest.approx(2000, rel=0.05)
    assert times == list(load.arrivals(4001))
    assert set(Load(model="m", output_len=1, max_concurrency=1).arrivals(5)) == {0.0}
