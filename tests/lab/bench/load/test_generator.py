"""Requests that the load generator sends, and the records of their answers."""

import asyncio
import gc
import io
import math
import re
import statistics
import sys
from array import array
from dataclasses import replace

import pytest

from radixkv import terminal
from radixkv.errors import ConfigError
from radixkv.lab.bench.load.arrivals import Load
from radixkv.lab.bench.load.client import OpenAIClient
from radixkv.lab.bench.load.generator import LoadGenerator
from radixkv.lab.bench.session import BenchRequest, Session, single_request_session
from radixkv.terminal import Progress
from support.cases import rest_nightly
from support.fake_openai import output_ids, output_text, prompt_ids
from support.loads import ask, chat, send, sessions_of


def answers_of(record):
    """Returns text and token ids of each choice of a record."""
    return [(answer.text, answer.token_ids) for answer in record.choices]


def expected(body, n=1, count=4):
    ids = [output_ids(body, count, index) for index in range(n)]
    return [("".join(map(output_text, choice)), choice) for choice in ids]


@pytest.mark.parametrize("splits_bytes", [False, True])
def test_a_record_has_the_streamed_answer(fake, splits_bytes):
    fake.splits_bytes = splits_bytes
    prompts = ["alpha beta", "alpha gamma", "delta"]
    measurement = send(fake.address, prompts, max_concurrency=1)
    for index, (prompt, record) in enumerate(zip(prompts, measurement.records, strict=True)):
        assert (record.error, record.session, record.turn) == (None, index, 0)
        assert answers_of(record) == expected(prompt)
        assert list(record.prompt_token_ids) == list(prompt.encode())
        assert (record.n_prompt_tokens, record.n_output_tokens) == (len(prompt), 4)
        assert len(record.arrivals) == 4
        assert 0 < record.ttft <= record.latency <= measurement.duration
        assert measurement.started <= record.started
    assert [record.n_cached_tokens for record in measurement.records] == [0, len("alpha "), 0]
    assert measurement.aborted is None


def test_the_body_requests_a_greedy_answer_of_a_fixed_length(fake):
    send(fake.address + "/v1/", ["one"])
    assert fake.paths == ["/v1/completions"]
    assert fake.bodies == [
        {
            "model": "fake-model",
            "prompt": "one",
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
    ]


@pytest.mark.parametrize("are_frozen", rest_nightly([True, False], kept=(0,)))
def test_objects_are_frozen_after_a_run_if_some_were_before(fake, are_frozen, monkeypatch):
    monkeypatch.undo()  # so that objects are counted
    (gc.freeze if are_frozen else gc.unfreeze)()
    try:
        send(fake.address, ["one"])
        assert bool(gc.get_freeze_count()) is are_frozen
    finally:
        gc.freeze()


def test_a_server_with_openais_fields_only_and_without_done_works(fake):
    fake.known_fields = {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    fake.sends_done = fake.returns_ids = False
    [refused] = send(fake.address, ["one"]).records
    assert refused.error_kind == "http_422"
    [record] = send(fake.address, ["one"], has_extensions=False).records
    assert (record.error, record.texts) == (None, (expected("one")[0][0],))
    assert [answer.finish_reason for answer in record.choices] == ["length"]


def test_choices_that_stream_concurrently_are_separated(fake):
    fake.delay = 0.05
    [record] = send(fake.address, [BenchRequest("one", 4, n=3, temperature=0.7, seed=11)]).records
    body = fake.bodies[0]
    assert (body["n"], body["temperature"], body["top_p"], body["seed"]) == (3, 0.7, 1.0, 11)
    assert answers_of(record) == expected("one", n=3)
    assert record.n_output_tokens == 12
    assert len(record.itl) == 9
    assert statistics.median(record.itl) > 0.01  # gaps within one choice, not between choices
    assert record.tpot == pytest.approx((record.arrivals[-1] - record.arrivals[0]) / 3)


@pytest.mark.parametrize("returns_ids", [False, True])
def test_messages_go_to_the_chat_endpoint_and_their_deltas_are_read(fake, returns_ids):
    fake.returns_ids = returns_ids
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ö?"}]
    [record] = send(fake.address, [BenchRequest(messages, 4, n=2)]).records
    assert fake.paths == ["/v1/chat/completions"]
    assert fake.bodies[0]["messages"] == messages
    assert "prompt" not in fake.bodies[0]
    texts = [text for text, _ in expected(fake.bodies[0], n=2)]
    assert record.error is None
    assert list(record.texts) == texts
    assert record.prompt_token_ids == (array("i", prompt_ids(fake.bodies[0])) if returns_ids else None)
    assert record.token_ids == ([output_ids(fake.bodies[0], 4, index) for index in (0, 1)] if returns_ids else None)
    assert [len(answer.arrivals) for answer in record.choices] == [4, 4]  # the first delta has only the role


def test_token_ids_are_sent_as_they_are_also_megabytes(fake):
    ids = tuple(range(100_000, 400_000))
    [record] = send(fake.address, [BenchRequest(ids, 1)]).records
    assert (record.error, fake.paths) == (None, ["/v1/completions"])
    assert list(record.prompt_token_ids) == list(ids) == fake.bodies[0]["prompt"]
    assert sys.getsizeof(record.prompt_token_ids) < 8 * len(ids)  # a run may have millions


@pytest.mark.parametrize("separate_finish", [False, True])
@pytest.mark.parametrize("empty_events", [0, 2])
@pytest.mark.parametrize("returns_ids", [False, True])
def test_only_events_with_output_are_arrivals(fake, separate_finish, empty_events, returns_ids):
    fake.separate_finish, fake.empty_events, fake.returns_ids = separate_finish, empty_events, returns_ids
    fake.delay = 0.05
    [record] = send(fake.address, ["one"]).records
    assert record.error is None
    assert (len(record.arrivals), len(record.itl)) == (4, 3)
    assert statistics.median(record.itl) > 0.02
    assert record.latency - record.ttft == pytest.approx(sum(record.itl))
    assert record.tpot == pytest.approx(sum(record.itl) / 3)
    assert record.texts == ("".join(map(output_text, output_ids("one", 4))),)


def test_max_concurrency_limits_requests_in_flight(fake):
    fake.min_in_flight = 3
    send(fake.address, [f"prompt {n}" for n in range(12)], max_concurrency=3)
    assert fake.most_in_flight == 3
    assert {body["prompt"] for body in fake.bodies[:3]} == {"prompt 0", "prompt 1", "prompt 2"}


def test_a_turn_has_the_conversation_so_far_and_waits_for_the_answer(fake):
    fake.min_in_flight = 2
    sessions = [chat("one:", " two:", " three:"), chat("uno:", " due:")]
    first, second, third, uno, due = records = send(fake.address, sessions).records
    assert [record.error for record in records] == [None] * 5
    assert [(record.session, record.turn) for record in records] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    prompts = [body["prompt"] for body in fake.bodies]
    assert set(prompts[:2]) == {"one:", "uno:"}
    assert f"one:{first.texts[0]} two:" in prompts
    assert f"one:{first.texts[0]} two:{second.texts[0]} three:" in prompts
    assert f"uno:{uno.texts[0]} due:" in prompts
    for before, after in ((first, second), (second, third), (uno, due)):
        assert after.started >= before.started + before.latency
    assert uno.started < first.started + first.latency  # sessions do not wait for each other


@pytest.mark.parametrize("rate", [None, 100.0])
def test_a_turn_waits_for_its_tools_and_its_latency_does_not(fake, rate):
    def turns():
        yield (BenchRequest("one", 1),)
        yield (BenchRequest("two", 1, after_s=0.3),)

    first, second = send(fake.address, [Session(turns, 2)], request_rate=rate).records
    answered = first.started + first.arrivals[-1]
    assert second.started >= answered + 0.3
    assert second.scheduled is None or second.scheduled >= answered + 0.3


def test_a_client_of_a_closed_loop_runs_one_session_at_a_time(fake):
    send(fake.address, [chat(f"{n}:", " a", " b") for n in range(3)], max_concurrency=1)
    assert [body["prompt"][0] for body in fake.bodies] == list("000111222")


def test_the_requests_of_a_turn_are_sent_together_and_get_all_replies(fake):
    fake.min_in_flight = 3
    received = []

    def turns():
        replies = yield [BenchRequest(f"branch {n}", 2, n=2) for n in range(3)]
        received.extend(reply.texts for reply in replies)
        yield [BenchRequest("the end", 1)]

    measurement = send(fake.address, [Session(turns, n_requests=4)])
    assert fake.most_in_flight == 3
    assert received == [tuple(text for text, _ in expected(f"branch {n}", n=2, count=2)) for n in range(3)]
    assert [record.turn for record in measurement.records] == [0, 0, 0, 1]
    assert fake.bodies[-1]["prompt"] == "the end"


def test_a_session_may_begin_with_a_later_turn_of_its_chat(fake):
    sessions = [
        single_request_session(BenchRequest("one: two:", 2), turn=4),
        replace(chat("uno:", " due:"), first_turn=1),
    ]
    records = send(fake.address, sessions).records
    assert [(record.session, record.turn) for record in records] == [(0, 4), (1, 1), (1, 2)]
    fake.dies_at = len(fake.bodies) + 1
    *_, unsent = send(fake.address, ["alpha", sessions[0]], max_concurrency=1).records
    assert (unsent.session, unsent.turn, unsent.error_kind) == (1, 4, "not_sent")


def test_max_concurrency_limits_requests_of_one_turn(fake):
    fake.min_in_flight = 2

    def turns():
        yield [BenchRequest(f"branch {n}", 2) for n in range(6)]

    measurement = send(fake.address, [Session(turns, n_requests=6)], max_concurrency=2)
    assert fake.most_in_flight == 2
    assert [record.error for record in measurement.records] == [None] * 6


def test_an_answer_is_checked(fake):
    text = "".join(map(output_text, output_ids("one", 2)))
    checks = [lambda reply: reply.texts == (text,), lambda reply: False, lambda reply: None, None]
    records = send(fake.address, [BenchRequest("one", 2, check=check) for check in checks]).records
    assert [record.is_correct for record in records] == [True, False, None, None]


def test_a_key_goes_with_every_request(fake):
    fake.key = "secret"

    async def question(client):
        return await client.model(), await client.flush()

    assert ask(fake.address, question, api_key="secret") == ("fake-model", "/flush_cache")
    with pytest.raises(ConfigError, match="401"):
        ask(fake.address, question)


def test_the_default_model_is_the_servers_first(fake):
    assert ask(fake.address, OpenAIClient.model) == "fake-model"
    with pytest.raises(ConfigError, match="404"):
        ask(fake.address + "/elsewhere", OpenAIClient.model)


@pytest.mark.parametrize("address", ["localhost:8000", "http://", "http://host:port", "ftp://host"])
def test_an_invalid_address_is_refused(address):
    with pytest.raises(ConfigError, match=f"{address!r} (is not an address|names no host|has no usable port)"):
        OpenAIClient(address)


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/flush_cache"), ("GET", "/flush_cache"), ("POST", "/reset_prefix_cache")]
)
def test_the_cache_is_flushed_by_the_endpoint_that_the_server_has(fake, method, path):
    fake.flushes_at = [(method, path)]
    assert ask(fake.address, OpenAIClient.flush) == path
    assert fake.flushed == [(method, path)]
    fake.flushes_at = []
    assert ask(fake.address, OpenAIClient.flush) is None


def test_progress_shows_requests_in_flight_cached_tokens_and_failures(fake, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(terminal, "START_DELAY_S", 0.1)
    fake.delay, fake.fault = 0.12, "http_500"
    stream = Terminal()

    async def go():
        async with OpenAIClient(fake.address) as client:
            with Progress("sending requests", stream=stream) as progress:
                sessions = sessions_of([BenchRequest(f"the same {n}", 1) for n in range(20)] + ["FAULT"] * 2)
                await LoadGenerator(client).run(sessions, Load("fake-model", max_concurrency=2), progress)

    asyncio.run(go())
    lines = stream.getvalue().split("\r\x1b[2K")
    # When a request ends, the next one is not sent yet. A busy machine may show no answers at first.
    pattern = r"sending requests: \d+/22, [12] in flight, [789]\d% cached, \d+ new tokens, \d+ tokens/s, \d+ s"
    assert any(re.fullmatch(pattern, line) for line in lines[1:])


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_sessions_without_limit_are_all_in_flight_at_once(fake):
    fake.min_in_flight = 20
    send(fake.address, [f"prompt {n}" for n in range(20)], max_concurrency=None, request_rate=math.inf)
    assert fake.most_in_flight == 20
