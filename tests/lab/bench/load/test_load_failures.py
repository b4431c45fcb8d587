"""Requests that fail, servers that go away, and runs that are interrupted."""

import asyncio
import re
import socket
import socketserver
import threading
from contextlib import contextmanager

import pytest

from radixkv.errors import ConfigError
from radixkv.lab.bench.load.arrivals import Load
from radixkv.lab.bench.load.client import OpenAIClient
from radixkv.lab.bench.load.generator import LoadGenerator
from radixkv.lab.bench.session import BenchRequest, Session
from support.live import LIMIT_S
from support.loads import ask, chat, send, sessions_of

SILENCE_S = 2.0
"""Silence limit of tests with a silent server; long enough for a busy machine."""


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        ("http_500", "http_500", "HTTP status 500: .*it broke"),
        ("http_429", "http_429", "HTTP status 429: .*it broke"),
        ("truncated", "stream", "the stream ended early"),
        ("error_event", "server", "the server reported .*the runtime died"),
        ("no_usage", "stream", "brought no usage"),
        ("null_usage", "stream", "brought no usage"),
        ("no_output", "stream", "brought no output"),
        ("not_json", "stream", "not a completion chunk"),
        ("cut", "disconnect", "ClientPayloadError"),
        ("cut_early", "disconnect", "ServerDisconnectedError"),
        ("silent", "timeout", "Timeout"),
        ("bad_prompt_ids", "stream", "prompt_token_ids .*2147483647"),
    ],
)
def test_a_failed_request_is_recorded_by_kind_and_the_others_continue(fake, fault, kind, reason):
    fake.fault = fault
    silence_limit_s = SILENCE_S if fault == "silent" else LIMIT_S
    measurement = send(fake.address, ["one", "FAULT", "two"], silence_limit_s=silence_limit_s)
    records = measurement.records
    assert [record.error_kind for record in records] == [None, kind, None]
    assert [record.error is None for record in records] == [True, False, True]
    assert re.search(reason, records[1].error)
    assert measurement.aborted is None


def test_missing_choices_fail_the_request(fake):
    fake.fault = "one_choice"
    records = send(fake.address, [BenchRequest("one", 4, n=2), BenchRequest("FAULT", 4, n=2)]).records
    assert [(record.error_kind, record.error) for record in records] == [
        (None, None),
        ("stream", "the stream brought 1 of 2 choices (n)"),
    ]


def test_a_failed_turn_ends_only_its_session(fake):
    fake.fault = "http_500"
    sessions = [chat("one", "FAULT", "never", "nor this"), chat("uno", "due", "tre")]
    records = send(fake.address, sessions).records
    assert [record.error_kind for record in records] == [None, "http_500", "not_sent", "not_sent", None, None, None]
    assert records[2].error == "not sent: an earlier turn of its session failed"
    assert not any("never" in body["prompt"] for body in fake.bodies)


def test_a_session_is_closed_when_it_fails(fake):
    fake.fault = "http_500"
    ends = []

    def turns():
        try:
            yield [BenchRequest("FAULT", 1)]
        finally:
            ends.append("closed")

    generator = turns()  # a reference, so that only ``close`` ends it
    send(fake.address, [Session(lambda: generator, n_requests=1)])
    assert ends == ["closed"]


@pytest.fixture
def closed_address():
    """The address of a port that is bound, so that no server can listen there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_an_unreachable_server_ends_the_run(closed_address):
    measurement = send(closed_address, ["one", "two", chat("uno", "due")], max_concurrency=1)
    assert [record.error_kind for record in measurement.records] == ["connect", *["not_sent"] * 3]
    assert re.match("the server at http://127.* is gone: ClientConnectorError: ", measurement.aborted)
    with pytest.raises(ConfigError, match="ClientConnectorError"):
        ask(closed_address, OpenAIClient.model)


@pytest.mark.parametrize(
    ("minimum", "settings"), [(9, {"max_concurrency": 2}), (1, {"max_concurrency": None, "request_rate": 30.0})]
)
def test_a_server_that_goes_away_ends_the_run_with_a_partial_result(fake, minimum, settings):
    fake.dies_at = 11
    fake.delay = 0.002
    measurement = send(fake.address, [f"prompt {n}" for n in range(400)], **settings)
    kinds = [record.error_kind for record in measurement.records]
    assert re.match("the server at http://127.* is gone: ", measurement.aborted)
    assert len(kinds) == 400
    assert minimum <= kinds.count(None) < 30  # in an open loop any number may be in flight
    assert "not_sent" in kinds
    assert set(kinds) <= {None, "connect", "disconnect", "not_sent", "stopped"}


@pytest.mark.parametrize(("fault", "kind"), [("http_503", "http_503"), ("error_event", "server")])
def test_an_unhealthy_server_ends_the_run(fake, fault, kind):
    fake.fault = fault
    prompts = ["one", "FAULT", *["two"] * 20]
    records = send(fake.address, prompts, max_concurrency=1).records
    assert [record.error_kind for record in records] == [None, kind, *[None] * 20]  # others may be served
    fake.health = 503
    measurement = send(fake.address, prompts, max_concurrency=1)
    assert [record.error_kind for record in measurement.records] == [None, kind, *["not_sent"] * 20]
    assert re.match("the server at http://127.* can no longer serve: ", measurement.aborted)


def test_an_error_of_the_workload_ends_the_run(fake):
    def turns():
        yield [BenchRequest("one", 1)]
        raise ConfigError("no second turn")

    with pytest.raises(ConfigError, match="no second turn"):
        send(fake.address, [Session(turns, n_requests=2), *["other"] * 5])


def test_an_idle_connection_that_the_server_closed_is_not_reused(fake):
    """The client replaces an idle connection that the server closed."""

    async def go():
        async with OpenAIClient(fake.address) as client:
            generator, load = LoadGenerator(client), Load("fake-model")
            first = await generator.run(sessions_of(["one"]), load)
            for connection in fake.connections:
                connection.shutdown(socket.SHUT_RDWR)
            await asyncio.sleep(0.1)
            second = await generator.run(sessions_of(["two"]), load)
            return [*first.records, *second.records]

    n_threads = threading.active_count()  # with those of other tests' servers
    assert [record.error for record in asyncio.run(go())] == [None, None]
    assert threading.active_count() <= n_threads + 2, "the server has a thread for each connection"


@pytest.mark.parametrize(
    ("maximum", "settings"), [(10, {"max_concurrency": 2}), (100, {"max_concurrency": None, "request_rate": 20.0})]
)
def test_a_server_that_never_answers_ends_the_run(maximum, settings):
    with listening(None) as address:
        measurement = send(address, [f"prompt {n}" for n in range(200)], silence_limit_s=0.3, **settings)
    kinds = [record.error_kind for record in measurement.records]
    assert re.match("the server at http://127.* has stopped answering: SocketTimeoutError", measurement.aborted)
    assert kinds[0] == "timeout"
    assert set(kinds) <= {"timeout", "stopped", "not_sent"}
    assert 200 - kinds.count("not_sent") <= maximum


def test_a_server_that_stops_answering_ends_the_run_with_a_partial_result(fake):
    fake.hangs_at = 6
    measurement = send(fake.address, [f"prompt {n}" for n in range(100)], silence_limit_s=3.0, max_concurrency=2)
    assert "has stopped answering" in measurement.aborted
    good = [record for record in measurement.records if record.error is None]
    assert len(good) == 5
    assert [record.error_kind for record in measurement.records].count("not_sent") >= 90
    last_answer = max(record.started + record.latency for record in good) - measurement.started
    assert last_answer <= measurement.duration < last_answer + 2.0, "without the wait for the server"


@pytest.mark.nightly
def test_a_timeout_of_one_request_does_not_end_the_run_while_others_are_answered(fake):
    """One request gets no byte while another is answered."""
    fake.fault, fake.delay = "mute", SILENCE_S / 5
    prompts = [BenchRequest("long", 12), "FAULT", "FAULT", "two"]
    measurement = send(fake.address, prompts, silence_limit_s=SILENCE_S, max_concurrency=2)
    assert [record.error_kind for record in measurement.records] == [None, "timeout", "timeout", None]
    assert measurement.aborted is None


@contextmanager
def listening(reply):
    """Runs a server that sends ``reply`` to each connection; None: it never answers."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(1 << 16)
            if reply is None:
                ended.wait(LIMIT_S)
            else:
                self.request.sendall(reply)

    ended = threading.Event()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        ended.set()
        server.shutdown()
        thread.join()


def test_the_error_has_the_answer_of_a_server_without_openais_api():
    with (
        listening(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone") as address,
        pytest.raises(ConfigError, match="/v1/models .*404"),
    ):
        ask(address, OpenAIClient.model)


@pytest.mark.parametrize(("status", "names_flag"), [(401, True), (403, False)])
def test_the_error_names_the_flag_for_a_missing_key(status, names_flag):
    with (
        listening(b"HTTP/1.1 %d No\r\nContent-Length: 2\r\n\r\nno" % status) as address,
        pytest.raises(ConfigError, match=f"HTTP status {status}: no") as caught,
    ):
        ask(address, OpenAIClient.model)
    assert ("--api-key" in str(caught.value)) is names_flag


def test_a_server_without_http_does_not_count_as_gone():
    with listening(b"\x00garbage\r\n\r\n") as address:
        measurement = send(address, ["one", "two"])
    assert [record.error_kind for record in measurement.records] == ["stream", "stream"]
    assert measurement.aborted is None


def test_requests_other_than_completions_have_a_time_limit(monkeypatch):
    monkeypatch.setattr("radixkv.lab.bench.load.client.FETCH_LIMIT_S", 0.1)
    with listening(None) as address:
        with pytest.raises(ConfigError, match="does not answer: TimeoutError"):
            ask(address, OpenAIClient.model)
        assert ask(address, OpenAIClient.metrics) is None
        assert ask(address, OpenAIClient.is_reachable)
