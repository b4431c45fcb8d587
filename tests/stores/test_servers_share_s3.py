"""Two servers that share a store in S3's protocol: what each finds of the other, and what faults cost."""

from __future__ import annotations

import itertools
import signal
import time
from pathlib import Path
from threading import Thread

import pytest

from stores.conftest import Start
from stores.store_processes import PROMPTS, S3, URL, ask, wait_until_written
from support.checkpoints import save_checkpoint
from support.device_support import HYBRIDS, OTHERS, random_ids
from support.failed_start import failed_start_error
from support.live import LIMIT_S, LiveServer, wait_for

COLD = {"device": 0, "host": 0, "storage": 0}


def unseen() -> str:
    """Returns a prompt that no server has seen."""
    return f"{str(time.time_ns())[::-1]} {PROMPTS[1]}"


def errors(server: LiveServer) -> str:
    return (server.folder / "errors").read_text()


def test_a_second_server_finds_the_prefixes_of_the_first(s3: S3, start: Start) -> None:
    with start() as first, start() as second:
        answers = [ask(first, prompt) for prompt in PROMPTS[:3]]
        assert [details for _, details in answers] == [COLD] * 3
        wait_until_written(first)
        for (answer, _), prompt in zip(answers, PROMPTS, strict=False):
            again, details = ask(second, prompt)
            assert again == answer
            assert details["storage"] > 64
            assert details["device"] == details["host"] == 0
        n_hits, n_fetched, n_lookups, n_missed, is_away = second.metrics(
            "store_prefix_cache_hits_total",
            "store_pages_fetched_total",
            "store_lookups_total",
            "store_pages_missed_total",
            "store_is_away",
        )
        assert n_hits == 16 * n_fetched > 0
        assert (n_lookups, n_missed, is_away) == (3, 0, 0)
        # a prompt that shares its beginning, and then one that the second has added to
        _, details = ask(second, PROMPTS[0] + "And in a year?")
        assert details["device"] > 64
        wait_until_written(second)
        _, details = ask(first, PROMPTS[3])
        assert details == COLD
        assert s3.keys()


MODELS = {
    "qwen3.5": HYBRIDS["qwen3.5"],
    "gemma3": {
        **OTHERS["gemma3"],
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 48,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_a_second_server_goes_on_from_the_states_of_the_first(
    name: str, s3: S3, start: Start, tmp_path: Path
) -> None:
    """A model with recurrent layers, or with window pages: the whole prefix, an earlier one where a later one is
    damaged, and the same tokens while the store is away."""
    model = tmp_path / "hybrid"
    save_checkpoint(model, **MODELS[name])
    flags = ("--dtype", "float32", "--max-model-len", "1024")
    stem, more = random_ids(390, seed=1), random_ids(200, seed=2)
    prompts = [stem, [*stem, *more]]
    with start(*flags, model=model) as first, start(*flags, model=model) as second:
        answers = []
        for prompt in prompts:
            before, n_written = set(s3.keys()), first.metric("store_pages_written_total")
            answers.append(ask(first, prompt)[0])
            wait_until_written(first, n_written)
        assert ask(second, stem) == (answers[0], {"device": 0, "host": 0, "storage": 384})
        for key in set(s3.keys()) - before:
            s3.put(key, bytes(5000))
        assert ask(second, prompts[1]) == (answers[1], {"device": 384, "host": 0, "storage": 0})
        assert second.metric("store_is_away") == 0
        s3.kill()
        new = random_ids(300, seed=3)
        assert ask(second, new) == (ask(first, new)[0], COLD)


def test_a_store_outlives_its_servers(s3: S3, start: Start) -> None:
    with start() as server:
        answer, _ = ask(server, PROMPTS[0])
        server.process.send_signal(signal.SIGTERM)  # what is left is written
        assert server.process.wait(timeout=LIMIT_S) == 0
    with start() as server:
        again, details = ask(server, PROMPTS[0])
        assert again == answer
        assert details["storage"] > 64


def test_a_salt_isolates(s3: S3, start: Start) -> None:
    with start() as first, start() as second:
        answer, _ = ask(first, PROMPTS[0], cache_salt="one")
        wait_until_written(first)
        assert ask(second, PROMPTS[0], cache_salt="two") == (answer, COLD)
        assert ask(second, PROMPTS[0]) == (answer, COLD)
        assert ask(second, PROMPTS[0], cache_salt="one")[1]["storage"] > 64


def test_a_store_that_goes_away_is_a_miss_and_is_used_again(s3: S3, start: Start) -> None:
    with start() as first, start() as second:
        answers = [ask(first, prompt)[0] for prompt in PROMPTS]
        wait_until_written(first)
        assert ask(second, PROMPTS[0])[1]["storage"] > 64
        s3.kill()
        started = time.monotonic()
        for answer, prompt in zip(answers[1:], PROMPTS[1:], strict=True):
            assert ask(second, prompt) == (answer, COLD)
        assert time.monotonic() - started < 5
        n_failures, is_away = second.metrics("store_failures_total", "store_is_away")
        assert (n_failures >= 1, is_away) == (True, 1)
        assert errors(second).count("is away") == 1
        assert "Traceback" not in errors(second)

        s3.start()  # empty
        new = [f"{n}. {PROMPTS[0]}" for n in range(2)]
        wait_for(lambda: bool(ask(second, unseen())) and "is back" in errors(second), "it stays away")
        assert second.metric("store_is_away") == 0
        n_written = second.metric("store_pages_written_total")
        new_answers = [ask(second, prompt)[0] for prompt in new]
        wait_for(lambda: second.metric("store_pages_written_total") > n_written + 8, "nothing is written")
        wait_for(lambda: bool(ask(first, unseen())) and len(s3.keys()) > 8, "no pages")
        again, details = ask(first, new[0])
        assert again == new_answers[0]
        assert details["storage"] > 64


def test_a_store_that_hangs_delays_no_running_answer(s3: S3, start: Start) -> None:
    with start() as first, start() as second:
        answers = [ask(first, prompt)[0] for prompt in PROMPTS[:4]]
        wait_until_written(first)
        arrivals: list[float] = []

        def stream() -> None:
            body = {"prompt": "Once", "max_tokens": 700, "ignore_eos": True, "stream": True}
            with second.http.stream("POST", "/v1/completions", json=body, timeout=LIMIT_S) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        arrivals.append(time.monotonic())

        streaming = Thread(target=stream)
        streaming.start()
        wait_for(lambda: len(arrivals) > 5, "no stream")
        s3.stop()
        times = [time.monotonic()]
        for answer, prompt in zip(answers, PROMPTS, strict=False):
            assert ask(second, prompt) == (answer, COLD)
            times.append(time.monotonic())
        streaming.join(timeout=LIMIT_S)
        s3.go_on()
        waits = [end - begin for begin, end in itertools.pairwise(times)]
        assert 1 <= waits[0] < 5  # it has waited for its lookup
        assert sum(times[0] < arrival < times[0] + 1 for arrival in arrivals) > 10  # and the other answer went on
        assert max(waits[1:]) < waits[0]
        assert "a lookup took longer than 1 s" in errors(second)


@pytest.mark.parametrize("damage", ["byte", "short", "another page"])
def test_a_damaged_page_is_a_miss(s3: S3, start: Start, damage: str) -> None:
    with start() as first:
        answer, _ = ask(first, PROMPTS[0])
        wait_until_written(first)
    pages = s3.pages()
    values = list(pages.values())
    for key, value in pages.items():
        flipped = value[:-1] + bytes([value[-1] ^ 1])
        s3.put(key, {"byte": flipped, "short": value[:-1], "another page": values[value == values[0]]}[damage])
    with start() as second:
        assert ask(second, PROMPTS[0]) == (answer, COLD)
        assert "is a miss" in errors(second)
        assert second.metric("store_pages_missed_total") > 0
        wait_for(lambda: any(value == pages.get(key) for key, value in s3.pages().items()), "it is not repaired")
        assert second.metric("store_is_away") == 0


def test_an_invalidated_prefix_leaves_the_store_and_a_flush_does_not(s3: S3, start: Start) -> None:
    with start() as first, start() as second:
        answer, _ = ask(first, PROMPTS[0])
        ask(first, PROMPTS[1])
        wait_until_written(first)
        n_pages = len(s3.keys())
        first.http.post("/flush_cache")
        assert ask(first, PROMPTS[0])[1]["storage"] > 64
        assert len(s3.keys()) == n_pages
        dropped = first.http.post("/cache/invalidate", json={"prompt": PROMPTS[0]}).json()
        assert dropped["pages_dropped"]["storage"] > 0, dropped
        wait_for(lambda: len(s3.keys()) < n_pages, "nothing is removed")
        assert ask(second, PROMPTS[0])[0] == answer


def test_starts_with_a_store_that_cannot_be_used(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def error(url: str) -> str:
        (folder := tmp_path / "t").mkdir(exist_ok=True)
        started = time.monotonic()
        text = failed_start_error(folder, "--host-memory", "64MiB", "--cache-url", url)
        assert time.monotonic() - started < 30
        assert url[:20] in text
        return text

    assert "NoSuchBucket" in error("s3://no-such-bucket/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "cannot be used" in error(URL)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert "AccessKeyId" in error(URL)
