"""``radixkv simulate --speculative-config``: what drafts would bring on recorded answers."""

import json
import tracemalloc
from itertools import islice
from random import Random

import pytest

from radixkv.checkpoints import resolve_tokenizer
from radixkv.lab.simulator.draft_replay import DraftReplay, Exchange
from radixkv.lab.simulator.recording import read_recording
from radixkv.settings.speculative import SpeculativeConfig
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import pack_tokens, unpack_tokens
from support.cases import rest_nightly
from support.json_lines import write_lines
from support.simulate_command import simulate

TREE = ("--speculative-config", '{"method": "tree"}')
ANSWER = "The dress of Kenji is green, and the cafe in Mill Street opens at ten."


@pytest.fixture
def drafted(simulated):
    """Runs a command that succeeds; returns its lines of drafts by source."""

    def run(*flags):
        return {row["source"]: row for row in simulated(*flags) if row["bench"] == "simulate-drafts"}

    return run


def test_steps_are_counted_for_each_source_and_for_all(tmp_path, drafted, capsys):
    line = {"prompt_token_ids": list(range(20)), "token_ids": list(range(100, 140))}
    rows = drafted("--trace", write_lines(tmp_path / "ids.jsonl", line, line), *TREE)
    # Each answer has 39 tokens after the first. The tree has the whole pages of the first line, so 48 of 60 tokens.
    # The newest answers are found by two tokens. The last token is sampled. A step has 17 tokens at most.
    steps = {"prompt": 78, "tree": 39 + 2 + 11, "answers": 39 + 1 + 3, "all": 39 + 3}
    assert {source: row["n_steps"] for source, row in rows.items()} == steps
    for row in rows.values():
        assert (row["n_requests"], row["n_answers"], row["n_answer_tokens"]) == (2, 2, 78)
        assert row["n_accepted_tokens"] == 78 - row["n_steps"] <= row["n_draft_tokens"]
        assert row["tokens_a_step"] == round(78 / row["n_steps"], 3)
        assert (row["method"], row["num_speculative_tokens"], row["tokenizer"]) == ("tree", 16, None)
    printed = capsys.readouterr().out
    assert "method tree: 2 answers with 78 tokens after the first" in printed
    last = next(line.split() for line in printed.splitlines() if line.startswith("all"))
    assert last == ["all", "1.86", "42", "46.2%", "37", "36", "97.3%"]
    assert "depends on the batch size and is not simulated" in " ".join(printed.split())
    assert "infinite" in printed, "the hit rate of an infinite cache needs no capacity"


def test_ngram_looks_at_the_requests_own_text(tmp_path, drafted):
    line = {"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7], "token_ids": [2, 3, 4, 5, 6, 9]}
    rows = drafted(
        "--trace",
        write_lines(tmp_path / "ids.jsonl", line),
        "--speculative-config",
        '{"method": "ngram", "num_speculative_tokens": 2}',
    )
    assert rows.keys() == {"prompt"}
    # After 2 nothing is known by two tokens. After 2 3: 4 5 and then 6. After that 7 is wrong.
    assert (rows["prompt"]["n_steps"], rows["prompt"]["n_accepted_tokens"]) == (3, 2)


def test_of_answers_in_flight_only_those_that_ended_are_recent(tmp_path, drafted, capsys):
    line = {"prompt_token_ids": list(range(20)), "token_ids": list(range(100, 140))}
    short = {"prompt_token_ids": list(range(30)), "token_ids": list(range(200, 203))}
    file = write_lines(tmp_path / "ids.jsonl", line, line, {"prompt_token_ids": [7]}, line, short)
    rows = drafted("--trace", file, *TREE, "--concurrency", 2)
    # The first two answers take the same rounds, so neither knows the other. The third one knows them, see above.
    steps = {"prompt": 2 * 39 + 39 + 2, "tree": 2 * 39 + 2 + 11 + 2, "answers": 2 * 39 + 1 + 3 + 2}
    steps["all"] = 2 * 39 + 3 + 2
    assert {source: row["n_steps"] for source, row in rows.items()} == steps
    for row in rows.values():
        assert (row["concurrency"], row["n_requests"], row["n_answers"]) == (2, 5, 4)
        assert row["n_accepted_tokens"] == 3 * 39 + 2 - row["n_steps"]
    assert "after the first, up to 2 answers in flight" in " ".join(capsys.readouterr().out.split())


def test_pages_that_an_answer_in_flight_has_filled_are_known(tmp_path, drafted):
    line = {"prompt_token_ids": list(range(16)), "token_ids": list(range(100, 140))}
    other = {"prompt_token_ids": [7], "token_ids": list(range(200, 219))}
    rows = drafted("--trace", write_lines(tmp_path / "ids.jsonl", line, other, line), *TREE, "--concurrency", 2)
    # The third answer begins 18 tokens after the first one. That has filled a page then, and another one 16 tokens
    # later: each gives 15 drafts. The first answer ends when the third one has 21 places, and is recent then.
    steps = {"tree": 2 + 7, "answers": 21 + 2, "all": 2 + 1, "prompt": 39}
    assert {source: row["n_steps"] - 39 - 18 for source, row in rows.items()} == steps


@pytest.mark.parametrize("end", [[139], []], ids=["with its last token", "without it"])
def test_turns_of_a_chat_wait_for_each_other(tmp_path, drafted, end):
    answer = list(range(100, 140))
    chat = [
        {"prompt_token_ids": list(range(16)), "token_ids": answer},
        {"prompt_token_ids": [*range(16), *answer[:-1], *end, 7], "token_ids": list(range(200, 220))},
    ]
    other = {"prompt_token_ids": [9], "token_ids": answer}
    file = write_lines(tmp_path / "ids.jsonl", *chat, other)
    # The second turn's prompt has the first one's answer, which nothing may know before it has ended. The other
    # chat does not wait: it begins with the first turn, and knows nothing of it.
    rows = drafted("--trace", file, *TREE, "--concurrency", 2)
    assert {row["n_steps"] for row in rows.values()} == {39 + 39 + 19}
    rows = drafted("--trace", file, *TREE)
    assert rows["answers"]["n_steps"] == 39 + 19 + 1 + 3


def test_one_client_sends_the_requests_in_order_without_a_copy_of_all():
    answer = pack_tokens(range(3))
    exchanges = [Exchange(pack_tokens(range(first, 10_000)), answer) for first in range(50)]
    exchanges += [Exchange(one.prompt + answer, answer) for one in exchanges]
    n_recorded = sum(len(one.prompt) for one in exchanges)
    replay = DraftReplay(SpeculativeConfig(method="ngram"), 100_000, 16)
    tracemalloc.start()
    try:
        places = replay.rounds(exchanges, 1)
        sent = [bytes(next(places)[0].request.prompt_key)]
        n_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert n_bytes < n_recorded / 4
    # Each answer has two places.
    sent += [bytes(place.request.prompt_key) for (place,) in islice(places, 1, None, 2)]
    assert sent == [one.prompt for one in exchanges]


def test_what_a_request_has_itself_does_not_depend_on_others_in_flight(tmp_path, drafted):
    random = Random(7)
    lines = [
        {
            "prompt_token_ids": random.choices(range(4), k=random.randint(1, 40)),
            "token_ids": random.choices(range(4), k=random.randint(0, 50)),
        }
        for _ in range(20)
    ]
    flags = ("--trace", write_lines(tmp_path / "ids.jsonl", *lines), "--speculative-config", '{"method": "ngram"}')
    rows = [drafted(*flags, "--concurrency", n)["prompt"] for n in (1, 3, 20, 1000)]
    assert len({(row["n_steps"], row["n_draft_tokens"], row["n_accepted_tokens"]) for row in rows}) == 1
    assert [row["concurrency"] for row in rows] == [1, 3, 20, 1000]


def test_steps_of_an_infinite_cache_have_the_size_that_is_asked_for(tmp_path, drafted, capsys):
    line = {"prompt_token_ids": list(range(50)), "token_ids": [1, 2, 3]}
    flags = ("--trace", write_lines(tmp_path / "ids.jsonl", line, line), *TREE, "--concurrency", 2)
    assert simulate(*flags, "--page-size", 24) == 1
    assert "max_num_batched_tokens 8192 is not one or more pages of 24" in capsys.readouterr().err
    assert drafted(*flags, "--page-size", 24, "--max-num-batched-tokens", 48)["all"]["n_answer_tokens"] == 4


CHAT = [
    {"role": "user", "content": "What is green?"},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": "Again."},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": "Once more."},
]


def answers_of(path, **settings):
    tokenizer = Tokenizer.load(resolve_tokenizer("tiny"))
    recording = read_recording(path, tokenizer="tiny", reads_answers=True, **settings)
    return [tokenizer.decode(unpack_tokens(answer), skip_special_tokens=False) for answer in recording.answers]


def test_answers_are_those_of_conversations_and_of_later_turns(tmp_path, drafted, capsys):
    whole = ANSWER + "<|eot_id|>"
    chats = write_lines(tmp_path / "chats.jsonl", {"messages": CHAT[:4]})
    assert answers_of(chats) == [whole, whole]
    turns = [{"messages": CHAT[:end]} for end in (1, 3, 5)]
    log = write_lines(tmp_path / "log.jsonl", *turns)
    assert answers_of(log) == [whole, whole, ""]
    assert answers_of(write_lines(tmp_path / "one.jsonl", turns[-1]), conversations=True) == [whole, whole]

    of_chats, of_log = (drafted("--trace", file, "--tokenizer", "tiny", *TREE) for file in (chats, log))
    assert of_chats["prompt"]["tokens_a_step"] > 1.5, "the second answer repeats the first"
    assert "without a known answer" not in capsys.readouterr().out.partition("log.jsonl")[0]
    for source, row in of_log.items():
        assert (row["n_requests"], row["n_answers"], row["tokenizer"]) == (3, 2, "tiny")
        assert row["n_steps"] == of_chats[source]["n_steps"]


def test_the_answer_to_a_request_with_tools_is_rendered_with_them(tmp_path):
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"city": "Oslo"}'}}
    said = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    found = [*said, {"role": "tool", "tool_call_id": "1", "content": "None."}]
    lines = [{"messages": messages, "tools": tools} for messages in (said[:1], found)]
    first, last = answers_of(write_lines(tmp_path / "log.jsonl", *lines))
    assert '{"name": "find", "arguments": {"city": "Oslo"}}' in first
    assert first.endswith("</tool_call><|eot_id|>")
    assert last == ""


def test_predictions_of_requests_are_a_source(tmp_path, drafted):
    first, later = ({"messages": CHAT[:end]} for end in (1, 3))
    parts = [{"type": "text", "text": ANSWER[:30]}, {"type": "text", "text": ANSWER[30:]}]
    tokenizer = Tokenizer.load(resolve_tokenizer("tiny"))
    n_tokens = len(unpack_tokens(tokenizer.encode(ANSWER, adds_special_tokens=False)))
    for method in ("tree", "ngram"):
        for content in (ANSWER, parts):
            predicted = first | {"prediction": {"type": "content", "content": content}}
            log = write_lines(tmp_path / "log.jsonl", predicted, later)
            rows = drafted(
                "--trace", log, "--tokenizer", "tiny", "--speculative-config", json.dumps({"method": method})
            )
            # The prediction guesses all tokens after the first, in steps of 16 or 8 and the sampled one. The token
            # that ends the answer is sampled.
            n_a_step = rows["prediction"]["num_speculative_tokens"] + 1
            assert rows["prediction"]["n_steps"] == -(-n_tokens // n_a_step) == rows["all"]["n_steps"]
            assert rows["prediction"]["n_accepted_tokens"] == n_tokens - rows["prediction"]["n_steps"]
            assert rows["prompt"]["n_steps"] > 3 * rows["prediction"]["n_steps"]


def test_recordings_without_predictions_have_no_such_source(tmp_path, drafted):
    turns = [{"messages": CHAT[:end]} for end in (1, 3)]
    nothing = [None, {"type": "content", "content": ""}, {"type": "content", "content": []}]
    for prediction in nothing:
        log = write_lines(tmp_path / "log.jsonl", *[turn | {"prediction": prediction} for turn in turns])
        assert "prediction" not in drafted("--trace", log, "--tokenizer", "tiny", *TREE)
    # A data set of conversations may have anything under that name.
    chats = write_lines(tmp_path / "chats.jsonl", {"messages": CHAT[:4], "prediction": ANSWER})
    assert drafted("--trace", chats, "--tokenizer", "tiny", *TREE).keys() == {"tree", "answers", "prompt", "all"}


@pytest.mark.parametrize(
    ("prediction", "message"),
    rest_nightly(
        [
            ("text", "prediction: Expected `object`, got `str`"),
            ({"type": "content"}, "prediction: Object missing required field `content`"),
            ({"type": "text", "content": "x"}, "prediction: Invalid enum value 'text' - at `$.type`"),
            ({"type": "content", "content": [{"type": "image"}]}, "at `$.content[0]"),
        ],
        kept=(1, 3),
    ),
)
def test_what_is_no_prediction_makes_a_bad_line(tmp_path, drafted, capsys, prediction, message):
    turns = [{"messages": CHAT[:end]} for end in (1, 3, 5)]
    log = write_lines(tmp_path / "log.jsonl", *turns, {"messages": CHAT[:1], "prediction": prediction})
    assert simulate("--trace", log, "--tokenizer", "tiny", *TREE) == 1
    error = capsys.readouterr().err
    assert "line 4 of " in error
    assert message in error
    assert simulate("--trace", log, "--tokenizer", "tiny", "--capacity", "1k") == 0, "it counts for drafts alone"
    rows = drafted("--trace", log, "--tokenizer", "tiny", "--skip-bad-lines", *TREE)
    assert rows["all"]["n_requests"] == 3


def test_requests_without_a_known_answer_are_named(tmp_path, capsys):
    lines = [{"prompt_token_ids": [1, 2, 3], "token_ids": [4, 5]}, {"prompt_token_ids": [1, 2, 3]}]
    assert simulate("--trace", write_lines(tmp_path / "ids.jsonl", *lines), *TREE) == 0
    assert "1 request without a known answer in the file" in capsys.readouterr().out


def test_known_answers_take_steps_and_pages_with_several_requests_in_flight(tmp_path, simulated):
    lines = [{"prompt_token_ids": [*range(20), turn], "token_ids": list(range(100, 140))} for turn in range(3)]
    file = write_lines(tmp_path / "ids.jsonl", *lines, {"prompt_token_ids": [7]})
    flags = ("--trace", file, "--capacity", "1k", "--concurrency", 2)
    assert {row["n_answer_tokens"] for row in simulated(*flags)} == {None}
    rows = [row for row in simulated(*flags, *TREE) if row["bench"] == "simulate"]
    # The first token ends a request without a known answer.
    assert {row["n_answer_tokens"] for row in rows} == {3 * 40 + 1}


def test_answers_are_left_out_of_no_replay_that_knows_them(tmp_path, capsys):
    line = {"prompt_token_ids": [1, 2, 3], "token_ids": [4, 5]}
    flags = ("--trace", write_lines(tmp_path / "ids.jsonl", line), "--capacity", "1k", "--concurrency", 2)
    assert simulate(*flags, *TREE) == 0
    assert "answers are left out" not in " ".join(capsys.readouterr().out.split())
    assert simulate(*flags, *TREE, "--output-len", 5) == 1
    assert "says how long its answers are; leave output_len 5 out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "flags", "message"),
    [
        ({"prompt_token_ids": [1, 2]}, [], "has no answers with which to compare drafts"),
        ({"messages": CHAT}, ["--tokenizer", "tiny"], "--conversations takes every line as one"),
        ({"prompt": "hi"}, ["--tokenizer", "tiny"], "has no answers"),
        (
            {"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [1]},
            [],
            "a trace of blocks, which has no tokens of answers",
        ),
        ({"prompt_token_ids": [1, 2], "token_ids": ["x"]}, [], "line 1 of "),
    ],
)
def test_what_a_file_lacks_is_named(tmp_path, line, flags, message, capsys):
    assert simulate("--trace", write_lines(tmp_path / "file.jsonl", line), *flags, *TREE) == 1
    printed = capsys.readouterr()
    assert (message in printed.err, printed.out) == (True, "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--speculative-config", '{"method": "eagle"}'], "this release has no method with a draft head"),
        (["--speculative-config", "tree"], "'tree' is neither a JSON object nor off"),
        ([*TREE, "--plot", "pictures"], "--plot draws hit rate by capacity"),
        ([*TREE, "--concurrency", "0"], "concurrency 0 must be at least 1"),
        ([*TREE, "--concurrency", "2.5"], "argument --concurrency/--max-concurrency"),
        ([*TREE, "--max-num-batched-tokens", "64"], "--max-num-batched-tokens needs several requests in flight"),
        *(
            ([*TREE, *flag.split()], f"{flag.split()[0]} is for finite caches; give --capacity, or leave it out")
            for flag in (
                "--servers 2 --routing prefix",
                "--routing prefix",
                "--events-delay 1",
                "--output-len 5",
                "--eviction-policy lru",
                "--ghost-capacity 2",
                "--ends-known 0.5",
                "--load-us-per-token 2",
                "--fetch-us-per-token 2",
                "--compute-us-per-token 2",
            )
        ),
    ],
)
def test_wrong_use_is_refused(tmp_path, flags, message, capsys):
    path = write_lines(tmp_path / "ids.jsonl", {"prompt_token_ids": [1], "token_ids": [2, 3]})
    with pytest.raises(SystemExit, match="2"):
        simulate("--trace", path, *flags)
    assert message in capsys.readouterr().err
