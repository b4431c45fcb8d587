"""The study's workloads, and lengths from files."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import chain, repeat
from pathlib import Path
from random import Random

import pytest

from radixkv.checkpoints import resolve_tokenizer
from radixkv.cli import main
from radixkv.errors import ConfigError
from radixkv.lab.bench.workloads.datasets import MESSAGES, PROBLEMS, TRACE
from radixkv.lab.studies.paging.lengths import (
    N_TURNS,
    SHAREGPT_MEANS,
    ChatLengths,
    LengthDistribution,
    LengthPair,
    WorkloadLengths,
    at_quantile,
    published_lengths,
)
from radixkv.lab.studies.paging.recorded_lengths import USED_BY, recorded_lengths
from radixkv.lab.studies.paging.workloads import (
    N_PREFIXES,
    N_SAMPLES,
    N_SHOTS,
    WORKLOADS,
    StudyWorkload,
    generate_workload,
)
from radixkv.text.tokenizer import Tokenizer
from support.json_lines import write_lines

PROBLEM = {"question": "How many?", "answer": "Two"}
REQUEST = {"timestamp": 0, "input_length": 5, "output_length": 7, "hash_ids": [1]}
DOCUMENT = {"text": "a", "questions": [PROBLEM]}


def generated(
    name: str, lengths: WorkloadLengths | None = None, *, seed: int = 0, max_model_len: int = 2048
) -> StudyWorkload:
    return generate_workload(
        name,
        published_lengths() if lengths is None else lengths,
        pool_tokens=8192,
        max_model_len=max_model_len,
        n_conversations=200,
        seed=seed,
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_tokenizer("tiny"))


def count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, adds_special_tokens=False)) // 4


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_seeds_give_equal_workloads_within_the_context(name: str) -> None:
    def contents(workload: StudyWorkload) -> list[object]:
        return [
            [[(sequence.prompt, sequence.answer) for sequence in turn.sequences] for turn in conversation]
            for conversation in workload.conversations
        ]

    first, second, other = generated(name), generated(name), generated(name, seed=1)
    assert (contents(first), first.arrivals) == (contents(second), second.arrivals)
    assert contents(first) != contents(other)
    assert len(first.conversations) == len(first.arrivals) == 200
    assert first.arrivals == sorted(first.arrivals)
    for conversation in first.conversations:
        for turn in conversation:
            for sequence in turn.sequences:
                assert sequence.n_prompt + sequence.answer.n_tokens <= 2048
                assert sequence.n_prompt >= 1
                assert sequence.answer.n_tokens >= 1


def test_there_are_enough_requests_to_fill_the_pool_four_times() -> None:
    workload = generate_workload("uniform-short", published_lengths(), pool_tokens=8192, max_model_len=2048)
    slots = sum(s.n_prompt + s.answer.n_tokens / 2 for c in workload.conversations for t in c for s in t.sequences)
    assert 4 * 8192 <= slots < 4 * 8192 + 2048


def test_arrivals_are_a_quarter_more_than_can_be_served() -> None:
    lengths = LengthDistribution("fixed", lambda rng: LengthPair(50, 100))
    workload = generate_workload(
        "uniform-short",
        WorkloadLengths(lengths, lengths, published_lengths().chats),
        pool_tokens=10_000,
        max_model_len=2048,
        n_conversations=4000,
    )
    # 100 sequences of 100 slots on average fit, each of which runs for 100 steps: one ends in a step.
    assert workload.arrivals[-1] / 4000 == pytest.approx(1 / 1.25, rel=0.05)


def test_few_prefixes_are_shared_by_all() -> None:
    workload = generated("shared-prefix")
    beginnings = Counter(conversation[0].sequences[0].prompt[0] for conversation in workload.conversations)
    assert len(beginnings) == N_PREFIXES
    assert all(prefix.n_tokens > 8 * (34 + 50) for prefix in beginnings)


def test_worked_examples_that_leave_no_room_are_drawn_again() -> None:
    workload = generated("shared-prefix", seed=1, max_model_len=1400)
    prefixes = {conversation[0].sequences[0].prompt[0] for conversation in workload.conversations}
    assert len(prefixes) == N_PREFIXES
    long, short = LengthPair(80, 80), LengthPair(5, 5)
    problems = chain([long] * N_SHOTS, repeat(short))
    lengths = LengthDistribution("synthetic", lambda rng: next(problems))
    chats, requests = published_lengths().chats, published_lengths().requests
    workload = generated("shared-prefix", WorkloadLengths(lengths, requests, chats), max_model_len=8 * 160)
    assert workload.n_left_out == 1
    assert {c[0].sequences[0].n_prompt for c in workload.conversations} == {8 * 10 + 5}


def test_turns_of_a_chat_continue_the_previous_turns() -> None:
    for conversation in generated("multi-turn").conversations:
        said = conversation[0].sequences[0].prompt[:1]
        for turn in conversation:
            (sequence,) = turn.sequences
            assert sequence.prompt[:-1] == said
            said = (*sequence.prompt, sequence.answer)


def test_samples_have_the_prompt_in_common() -> None:
    for conversation in generated("parallel-sampling").conversations:
        (turn,) = conversation
        assert len({sequence.prompt for sequence in turn.sequences}) == 1
        assert len({sequence.answer for sequence in turn.sequences}) == N_SAMPLES


def test_requests_that_are_too_long_are_counted() -> None:
    def alternating(rng: Random) -> LengthPair:
        return rng.choice((LengthPair(10, 10), LengthPair(90, 11)))

    lengths = LengthDistribution("synthetic", alternating)
    workload = generated(
        "variable-length", WorkloadLengths(lengths, lengths, published_lengths().chats), max_model_len=100
    )
    assert all(c[0].sequences[0].n_prompt == 10 for c in workload.conversations)
    assert workload.n_left_out == pytest.approx(200, abs=60)
    chats = LengthDistribution(
        "synthetic", lambda rng: ChatLengths("", 10, (LengthPair(10, 30), LengthPair(10, 30), LengthPair(10, 30)))
    )
    workload = generated("multi-turn", WorkloadLengths(lengths, lengths, chats), max_model_len=100)
    assert {len(conversation) for conversation in workload.conversations} == {2}
    assert workload.n_left_out == 200


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_context_that_holds_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--max-model-len 2 holds none of"):
        generated(name, max_model_len=2)


def test_published_lengths_have_their_means() -> None:
    draw, rng = published_lengths().requests.draw, Random(0)
    pairs = [draw(rng) for _ in range(20_000)]
    for position, mean in enumerate(SHAREGPT_MEANS):
        assert sum(pair[position] for pair in pairs) / len(pairs) == pytest.approx(mean, rel=0.05)


def test_quantiles() -> None:
    assert [at_quantile(N_TURNS, share) for share in (0.0, 0.05, 0.5, 0.99, 1.0)] == [2, 5, 11, 30, 30]
    assert at_quantile(((0.0, 0), (0.5, 10), (1.0, 110)), 0.75) == 60


def test_lengths_of_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    problems = write_lines(
        tmp_path / "p.jsonl", {"question": "How many apples are there?", "answer": "Two. #### 2"}
    )
    trace = write_lines(
        tmp_path / "t.jsonl", {"timestamp": 0, "input_length": 513, "output_length": 7, "hash_ids": [1, 2]}
    )
    messages = [
        {"role": "system", "content": "Be kind to all."},
        {"role": "assistant", "content": "Hello, what is it?"},
        {"role": "user", "content": "Book a flight to Rome."},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "book", "arguments": "{}"}}]},
        {"role": "assistant", "content": "One moment."},
        {"role": "tool", "content": "booked"},
        {"role": "assistant", "content": "It is booked."},
        {"role": "user", "content": "Thank you"},
    ]
    chats = write_lines(tmp_path / "m.jsonl", {"messages": messages})
    recorded = recorded_lengths([trace, problems, chats], "tiny").lengths
    rng = Random(0)
    assert recorded.problems.source == "p.jsonl"
    assert recorded.problems.draw(rng) == (
        count(tokenizer, "How many apples are there?"),
        count(tokenizer, "Two. #### 2"),
    )
    assert (recorded.requests.source, recorded.requests.draw(rng)) == ("t.jsonl", (513, 7))
    chat = recorded.chats.draw(rng)
    assert chat.n_system == count(tokenizer, "Be kind to all.")
    calls = '[{"function": {"name": "book", "arguments": {}}}]'  # as templates get them
    assert chat.turns == (
        (
            count(tokenizer, "Hello, what is it?") + count(tokenizer, "Book a flight to Rome."),
            count(tokenizer, calls) + count(tokenizer, "One moment."),
        ),
        (count(tokenizer, "booked"), count(tokenizer, "It is booked.")),
    )
    without_trace = recorded_lengths([chats], "tiny").lengths
    assert without_trace.requests.draw(rng) == (chat.n_system + chat.turns[0].prompt, chat.turns[0].answer)
    assert without_trace.problems.source.startswith("uniform")


def test_an_array_of_sharegpt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "s.json"
    said = [{"from": "human", "value": "Hello there"}, {"from": "gpt", "value": "Good morning"}]
    path.write_text(json.dumps([{"conversations": said}, {"conversations": said[:1]}], indent=1), encoding="utf-8")
    chat = recorded_lengths([path], "tiny").lengths.chats.draw(Random(0))
    assert chat.turns == ((count(tokenizer, "Hello there"), count(tokenizer, "Good morning")),)


def test_the_tokenizer_that_counted_is_named(tmp_path: Path) -> None:
    problems = write_lines(tmp_path / "p.jsonl", PROBLEM)
    trace = write_lines(tmp_path / "t.jsonl", REQUEST)
    recorded = recorded_lengths([problems, trace], str(resolve_tokenizer("tiny"))).lengths
    named = {
        name: generated(name, recorded).tokenizer for name in ("uniform-short", "variable-length", "multi-turn")
    }
    folder = resolve_tokenizer("tiny").name
    assert named == {"uniform-short": folder, "variable-length": None, "multi-turn": None}


def test_a_models_revision_is_not_used_for_another_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = write_lines(tmp_path / "p.jsonl", {"question": "one two", "answer": "three four five"})
    flags = ["--model", "org/model", "--revision", "v2", "--tokenizer", "tiny", "--dataset-path", str(problems)]
    sizes = ["--max-total-tokens", "512", "--max-model-len", "64", "--page-sizes", "none", "--schemes", "radix"]
    assert main(["bench", "paging", *flags, *sizes, "--workloads", "uniform-short"]) == 0
    assert "uniform-short" in capsys.readouterr().out


def test_files_that_no_workload_uses_are_refused(tmp_path: Path) -> None:
    problems = write_lines(tmp_path / "p.jsonl", {"question": "a", "answer": "b"})
    trace = write_lines(tmp_path / "t.jsonl", REQUEST)
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats = write_lines(tmp_path / "c.jsonl", {"messages": said})
    for paths, workload, message in (
        (
            [problems],
            "multi-turn",
            "p.jsonl is a file of problems, which gives lengths to uniform-short, shared-pr",
        ),
        (
            [problems, trace],
            "shared-prefix",
            "t.jsonl is a Mooncake trace, which gives lengths to variable-length, ",
        ),
        (
            [trace, chats],
            "variable-length",
            "c.jsonl is a file of OpenAI messages, which gives lengths to multi-turn",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            recorded_lengths(paths, "tiny", workloads=[workload])
    assert recorded_lengths([chats], "tiny", workloads=["variable-length"]).lengths.requests.source == "c.jsonl"


@pytest.mark.parametrize("name", WORKLOADS)
def test_each_workload_draws_from_its_files(name: str) -> None:
    def of(kind: str) -> LengthDistribution[LengthPair]:
        return LengthDistribution(kind, lambda rng: LengthPair(20, 20))

    chats = LengthDistribution(MESSAGES.name, lambda rng: ChatLengths("", 10, (LengthPair(10, 10),)))
    for requests in (TRACE.name, MESSAGES.name):
        drawn_from = generated(name, WorkloadLengths(of(PROBLEMS.name), of(requests), chats)).lengths
        assert name in USED_BY[drawn_from]


def test_wrong_files(tmp_path: Path) -> None:
    bad = write_lines(tmp_path / "bad.jsonl", PROBLEM, {"question": "a"})
    with pytest.raises(ConfigError, match=r"line 2 of .*bad\.jsonl"):
        recorded_lengths([bad], "tiny")
    assert recorded_lengths([bad], "tiny", skip_bad_lines=True).n_bad_lines == 1
    other = write_lines(tmp_path / "other.jsonl", PROBLEM)
    silent = write_lines(tmp_path / "silent.jsonl", {"messages": [{"role": "user", "content": "hello"}]})
    for paths, message in (
        ([bad, other], r"bad\.jsonl and .*other\.jsonl are both a file of problems"),
        ([tmp_path / "none.jsonl"], r"cannot read --dataset-path .*none\.jsonl: No such file"),
        ([write_lines(tmp_path / "unknown.jsonl", {"a": 1})], "has no line like any of"),
        ([write_lines(tmp_path / "deep.json", 100_000 * b"[")], "has no line like any of"),
        ([write_lines(tmp_path / "d.jsonl", DOCUMENT)], "is a file of documents, and not one of"),
        ([silent], r"no conversation of .*silent\.jsonl has an answer"),
    ):
        with pytest.raises(ConfigError, match=message):
            recorded_lengths(paths, "tiny")
