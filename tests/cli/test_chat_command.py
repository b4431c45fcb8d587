"""Tests of ``radixkv chat``: in this process, with a server, through pipes and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from radixkv import terminal as terminal_module
from radixkv.cli import main
from support.cases import rest_nightly
from support.fake_openai import FakeServer
from support.live import LIMIT_S

POOL = ["--max-total-tokens", "2048", "--max-model-len", "1024"]
REUSED = re.compile(r"\[(\d+) of (\d+) prompt tokens from the cache, (\d+) new tokens, \d+\.\d s(.*)\]")


Chat = Callable[..., str]


@pytest.fixture
def chat(type_in: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> Chat:
    """Runs a session on the given input and returns its output."""

    def run(lines: str, *flags: str) -> str:
        type_in(lines)
        assert main(["chat", *flags]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return run


def test_each_turn_reuses_the_ones_before(chat: Chat) -> None:
    lines = "How many legs have 12 hens?\nAnd 7 cows?\n\n/clear\nHow many legs have 12 hens?\n/fly\n/exit\nnever\n"
    flags = ["--system", "You are a patient teacher of mathematics.", "--max-tokens", "8", "--temperature", "0"]
    shown = chat(lines, *flags, *POOL)
    (cold, first, n_new, end), (second, longer, *_), (warm, same, *_) = REUSED.findall(shown)
    assert (cold, n_new, end) == ("0", "8", ", cut off by max_tokens")
    assert int(first) - 16 < int(second) <= int(longer) - 8
    assert (same, int(warm)) == (first, int(first) // 16 * 16)
    answers = REUSED.split(shown)[::5]
    assert answers[0].strip() == answers[2].strip() != ""
    assert "unknown command; /clear" in shown


def test_a_failed_turn_is_reported_and_dropped(chat: Chat) -> None:
    shown = chat("hello\n" + "hens " * 1200 + "\nhello\n", "--max-tokens", "4", *POOL)
    assert shown.count("error: ") == 1
    assert "maximum context length is 1024 tokens" in shown
    turns = REUSED.findall(shown)
    assert len(turns) == 2
    assert all(int(n_prompt) < 100 for _, n_prompt, *_ in turns)


@pytest.mark.parametrize(
    ("context", "pool", "n_tokens"), rest_nightly([("64", "64", 64), ("1024", "64", 65)], kept=(1,))
)
def test_an_answer_fits_in_context_and_pool(chat: Chat, context: str, pool: str, n_tokens: int) -> None:
    shown = chat(
        "hello\n", "--max-tokens", "9999", "--ignore-eos", "--max-model-len", context, "--max-total-tokens", pool
    )
    ((_, n_prompt, n_new, end),) = REUSED.findall(shown)
    assert int(n_prompt) + int(n_new) == n_tokens  # the last token of an answer needs no KV in the pool
    assert end == ", cut off by max_tokens"


def test_the_error_of_a_full_context_suggests_clear(chat: Chat) -> None:
    shown = chat(
        f"{'hens ' * 100}\n/clear\nhens\n",
        "--max-tokens",
        "4",
        "--max-total-tokens",
        "512",
        "--max-model-len",
        "64",
    )
    assert "maximum context length is 64 tokens" in shown
    assert "/clear" in shown
    assert len(REUSED.findall(shown)) == 1


def test_chat_with_a_server(fake: FakeServer, chat: Chat) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "Good "}}]},
        {"choices": [{"delta": {"content": "day"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": usage},
    ]
    fake.responses = {
        "/v1/models": lambda _: {"data": [{"id": "served"}]},
        "/v1/chat/completions": lambda _: events,
    }
    flags = ["--base-url", fake.address + "/v1", "--api-key", "secret", "--top-k", "5", "--system", "Be brief."]
    shown = chat("hello\nagain\n", *flags)
    assert shown.count("Good day\n[5 of 9 prompt tokens from the cache, 2 new tokens, ") == 2
    (_, first, key), (_, second, _) = fake.requests[1:]
    assert key == "Bearer secret"
    assert (first["model"], first["top_k"]) == ("served", 5)
    assert "max_tokens" not in first  # the server defaults to what the context has left
    assert [message["content"] for message in second["messages"]] == ["Be brief.", "hello", "Good day", "again"]
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]


def test_a_servers_error_does_not_end_the_session(fake: FakeServer, chat: Chat) -> None:
    answers = iter([[{"error": {"message": "it broke"}}], [{"choices": [{"delta": {"content": "Fine"}}]}]])
    fake.responses = {"/v1/chat/completions": lambda _: next(answers)}
    shown = chat("one\ntwo\n", "--base-url", fake.address, "--model", "m")
    assert "error: " in shown
    assert "it broke" in shown
    assert "Fine\n[an unknown part of 0 prompt tokens" in shown
    assert [message["content"] for message in fake.requests[1][1]["messages"]] == ["two"]


@pytest.mark.parametrize(("status", "suggests_key"), [(401, True), (403, False), (404, False)])
def test_only_status_401_suggests_an_api_key(fake: FakeServer, chat: Chat, status: int, suggests_key: bool) -> None:
    fake.responses = {"/v1/chat/completions": lambda _: {"error": {"message": "no"}}}
    fake.status = status
    shown = chat("hello\n", "--base-url", fake.address, "--model", "m")
    assert f"answered {status}: no" in shown
    assert ("--api-key" in shown) is suggests_key


def test_a_line_that_is_not_text_does_not_end_the_session(fake: FakeServer) -> None:
    fake.responses = {"/v1/chat/completions": lambda _: [{"choices": [{"delta": {"content": "Fine"}}]}]}
    command = [sys.executable, "-m", "radixkv.cli", "chat", "--base-url", fake.address, "--model", "m"]
    done = subprocess.run(command, input=b"caf\xe9\ncaf\xc3\xa9\n", capture_output=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"that line is not UTF-8 text\nFine\n[")
    assert fake.requests[0][1]["messages"] == [{"role": "user", "content": "caf\u00e9"}]


@pytest.fixture
def events(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Makes the fake server the one at the default address; returns the events with which it answers."""
    events: list[dict[str, object]] = [{"choices": [{"delta": {"content": "Good day"}, "finish_reason": "stop"}]}]
    fake.responses = {
        "/v1/models": lambda _: {"data": [{"id": "served"}]},
        "/v1/chat/completions": lambda _: events,
    }
    monkeypatch.setattr("radixkv.cli.chat.DEFAULT_URL", fake.address)
    return events


@pytest.fixture
def session(
    events: list[dict[str, object]], type_in: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """Runs a session of one question with these flags; returns what it printed and its notes."""

    def run(*flags: str) -> tuple[str, str]:
        type_in("How many legs have 2 hens?\n")
        assert main(["chat", "--max-tokens", "8", *flags]) == 0
        printed = capsys.readouterr()
        return printed.out, printed.err

    return run


def test_a_running_server_is_used_and_named(fake: FakeServer, session: Callable[..., tuple[str, str]]) -> None:
    shown, notes = session()
    assert shown.startswith("Good day\n[")
    assert notes.count("\n") == 1
    assert "served" in notes
    assert fake.address in notes
    assert fake.requests[-1][1]["model"] == "served"


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("tiny",), marks=pytest.mark.nightly),
        pytest.param(("--model", "tiny"), marks=pytest.mark.nightly),
        POOL,
        pytest.param(("--device", "cpu"), marks=pytest.mark.nightly),
    ],
)
def test_a_model_or_a_flag_of_the_engine_is_for_this_process(
    fake: FakeServer, session: Callable[..., tuple[str, str]], flags: tuple[str, ...]
) -> None:
    shown, notes = session(*flags)
    assert REUSED.search(shown)
    assert (notes, fake.requests) == ("", [])


@pytest.mark.parametrize(
    "there",
    rest_nightly(["nothing", "another program", "a server with a key", "a server of no models"], kept=(0,)),
)
def test_without_a_usable_server_the_model_runs_here_and_the_reason_is_told(
    fake: FakeServer, session: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    if there == "nothing":
        monkeypatch.setattr("radixkv.cli.chat.DEFAULT_URL", "http://127.0.0.1:9")
    elif there == "a server with a key":
        fake.key = "secret"
    else:
        reply = b"<html>" if there == "another program" else {"data": []}
        fake.responses["/v1/models"] = lambda _: reply
    shown, notes = session()
    assert REUSED.search(shown)
    assert "running the model in this process" in notes
    assert ("RADIXKV_API_KEY" in notes) is (there == "a server with a key")


@pytest.mark.usefixtures("events")
def test_a_key_is_for_the_running_server(fake: FakeServer, type_in: Callable[[str], None]) -> None:
    fake.key = "secret"
    type_in("hello\n")
    assert main(["chat", "--api-key", "wrong"]) == 1
    assert main(["chat", "--api-key", "secret"]) == 0
    with pytest.raises(SystemExit):
        main(["chat", "tiny", "--api-key", "secret"])


@pytest.mark.parametrize("last_line_ends", [True, False])
def test_a_finish_reason_ends_a_stream_without_done(
    fake: FakeServer, events: list[dict[str, object]], session: Callable[..., tuple[str, str]], last_line_ends: bool
) -> None:
    events.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}})
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    fake.responses["/v1/chat/completions"] = lambda _: (text if last_line_ends else text.rstrip()).encode()
    shown, _ = session()
    assert shown.startswith("Good day\n[an unknown part of 9 prompt tokens")


def test_a_stream_that_ends_without_finish_reason_and_done_is_an_error(
    fake: FakeServer, session: Callable[..., tuple[str, str]]
) -> None:
    fake.responses["/v1/chat/completions"] = lambda _: b'data: {"choices": [{"delta": {"content": "Good"}}]}\n\n'
    shown, _ = session()
    assert "error: " in shown
    assert "ended early" in shown


class Terminal:
    """A chat session on a pseudo-terminal."""

    def __init__(self, *flags: str, term: str = "dumb") -> None:
        self._near, far = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "radixkv.cli", "chat", *flags],
            stdin=far,
            stdout=far,
            stderr=far,
            env=os.environ | {"TERM": term},
            start_new_session=True,
        )
        os.close(far)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._near, text.encode())

    def wait_for(self, pattern: str, limit_s: float = LIMIT_S) -> str:
        """Waits for the pattern; returns and consumes the output up to its end."""
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._near, selectors.EVENT_READ)
            while (found := re.search(pattern, self.text)) is None:
                assert selector.select(max(0.0, deadline - time.monotonic())), self.text
                self.text += os.read(self._near, 65536).decode(errors="replace")
        seen, self.text = self.text[: found.end()], self.text[found.end() :]
        return seen

    def interrupt_prompt(self) -> None:
        """Presses Ctrl-C at the prompt until there is a new one: readline misses a Ctrl-C that comes too early."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._near, selectors.EVENT_READ)
            for _ in range(100):
                self.process.send_signal(signal.SIGINT)
                if selector.select(2.0):
                    break
        self.wait_for("> ")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._near)


def test_a_terminal_shows_that_the_chat_waits_for_the_first_token(fake: FakeServer) -> None:
    may_answer = threading.Event()

    def answer(_: object) -> list[object]:
        assert may_answer.wait(LIMIT_S)
        texts = ["", "Good ", "day"]
        return [{"choices": [{"delta": {"content": text}}]} for text in texts]

    fake.responses = {"/v1/chat/completions": answer}
    session = Terminal("--base-url", fake.address, "--model", "m", term="xterm")
    try:
        session.wait_for("> ")
        session.type("hello\n")
        session.wait_for("waiting for the first token, ")
        may_answer.set()
        shown = session.wait_for(r"\[.*\]\r\n")
        assert re.search(r"\x1b\[1A\x1b\[2KGood day\r\n\[an unknown part", shown)
    finally:
        may_answer.set()
        session.close()


def test_ctrl_c_ends_the_wait_for_the_first_token(fake: FakeServer) -> None:
    may_answer = threading.Event()
    fake.responses = {"/v1/chat/completions": lambda _: [may_answer.wait(LIMIT_S)]}
    session = Terminal("--base-url", fake.address, "--model", "m", term="xterm")
    try:
        session.wait_for("> ")
        session.type("hello\n")
        session.wait_for("waiting for the first token, ")
        session.process.send_signal(signal.SIGINT)
        session.wait_for(r"\x1b\[1A\x1b\[2K\r\n\[interrupted after \d+\.\d s\]\r\n.*> ")
    finally:
        may_answer.set()
        session.close()


def test_without_a_terminal_the_chat_waits_silently(
    fake: FakeServer, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal_module, "START_DELAY_S", 0.0)

    def answer(_: object) -> list[object]:
        time.sleep(0.05)
        return [{"choices": [{"delta": {"content": "Fine"}}]}]

    fake.responses = {"/v1/chat/completions": answer}
    assert chat("hello\n", "--base-url", fake.address, "--model", "m").startswith("Fine\n[")


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    # Its answers are long enough to be interrupted on a slow machine.
    opened = Terminal("--max-tokens", "4000", "--ignore-eos", "--max-total-tokens", "16384")
    yield opened
    opened.close()


@pytest.mark.nightly
def test_ctrl_c_ends_the_answer_and_not_the_session(terminal: Terminal) -> None:
    terminal.wait_for(r"/clear [\s\S]*> ")
    terminal.type("hello\n")
    terminal.wait_for(r"hello\r?\n[\s\S]{20}")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for(r"\[interrupted after \d+\.\d s\][\s\S]*> ")
    terminal.interrupt_prompt()
    terminal.type("again\n")
    terminal.wait_for(r"again\r?\n[\s\S]{20}")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for(r"\[interrupted after [\s\S]*> ")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=LIMIT_S) == 0
