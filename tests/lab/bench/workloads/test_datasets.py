import gzip
import json
import os
import threading

import pytest

from radixkv.errors import ConfigError
from radixkv.lab.bench.workloads.arithmetic import read_problems
from radixkv.lab.bench.workloads.base import Source
from radixkv.lab.bench.workloads.conversations import read_conversations
from radixkv.lab.bench.workloads.datasets import MAX_LINE_BYTES
from radixkv.lab.bench.workloads.documents import read_documents
from radixkv.lab.bench.workloads.mooncake import read_trace
from support.json_lines import write_lines
from support.sessions import make

PROBLEM = {"question": "How many?", "answer": "Two.\n#### 2"}
REQUEST = {"timestamp": 5, "input_length": 513, "output_length": 9, "hash_ids": [0, 7]}
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
DOCUMENT = {"text": "The key is red.", "questions": [{"question": "Which colour?", "answer": "red"}]}

READERS = [
    (read_problems, PROBLEM),
    (read_trace, REQUEST),
    (read_conversations, MESSAGES),
    (read_conversations, SHAREGPT),
    (read_documents, DOCUMENT),
]
FORMATS = ["problems", "trace", "messages", "sharegpt", "documents"]


def data(folder, *lines):
    return write_lines(folder / "data.jsonl", *lines)


def refusal(reader, path, **settings):
    with pytest.raises(ConfigError) as caught:
        reader(path, **settings)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_problems_are_read_unchanged(tmp_path):
    path = data(tmp_path, PROBLEM, {**PROBLEM, "answer": "#### 3", "more": [1]})
    read = read_problems(path)
    assert [(each.question, each.answer) for each in read.items] == [
        ("How many?", "Two.\n#### 2"),
        ("How many?", "#### 3"),
    ]
    assert read.n_bad_lines == 0


def test_a_trace_is_read_in_order(tmp_path):
    (first, second) = read_trace(data(tmp_path, REQUEST, {**REQUEST, "hash_ids": [3, 4]})).items
    assert (first.timestamp, first.input_length, first.output_length, first.hash_ids) == (5.0, 513, 9, [0, 7])
    assert second.hash_ids == [3, 4]


def test_sharegpt_becomes_openai_messages(tmp_path):
    said = [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
        {"from": "USER", "value": "Bye"},
    ]
    (conversation,) = read_conversations(data(tmp_path, {"id": "a", "conversations": said})).items
    assert conversation.messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]


def test_openai_messages_keep_their_calls(tmp_path):
    call = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"key": "red"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Find it."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "name": "find", "content": "in the attic"},
        {"role": "assistant", "content": "It is in the attic."},
    ]
    (conversation,) = read_conversations(data(tmp_path, {"task_id": 3, "messages": messages})).items
    assert conversation.messages == messages


@pytest.mark.parametrize("field", ["text", "context", "document"])
def test_documents_come_with_their_problems(tmp_path, field):
    questions = [*DOCUMENT["questions"], {"question": "And now?", "answer": "It is.\n#### blue"}]
    (document,) = read_documents(data(tmp_path, {field: "The key is red.", "questions": questions})).items
    assert document.text == "The key is red."
    assert [problem.answer for problem in document.problems] == ["#### red", "It is.\n#### blue"]


@pytest.mark.parametrize(("reader", "line"), READERS, ids=FORMATS)
def test_line_ends_and_byte_order_marks_make_no_difference(tmp_path, reader, line):
    text = json.dumps(line).encode()
    plain = reader(data(tmp_path, text, text)).items
    odd = tmp_path / "odd.jsonl"
    odd.write_bytes(b"\xef\xbb\xbf\r\n\r\n" + text + b"\r\n  \t\r\n" + text)
    assert reader(odd).items == plain
    array = tmp_path / "array.json"
    array.write_text(json.dumps([line, line], indent=2))
    assert reader(array).items == plain


def test_a_pipe_can_be_read(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=(json.dumps(PROBLEM),))
    writer.start()
    assert len(read_problems(path).items) == 1
    writer.join()


BAD = [
    (read_problems, PROBLEM, b"{", "truncated"),
    (read_problems, PROBLEM, b"How many?", "JSON is malformed"),
    (read_problems, PROBLEM, b'{"question": "\xff", "answer": ""}', "utf-8"),
    (read_problems, PROBLEM, b"\0" * 20, "JSON is malformed"),
    (read_problems, PROBLEM, b"[" * 9, "Expected `object`, got `array`"),
    (read_problems, PROBLEM, {"question": "How many?"}, "missing required field `answer`"),
    (read_problems, PROBLEM, {**PROBLEM, "answer": 2}, "Expected `str`, got `int` - at `$.answer`"),
    (read_trace, REQUEST, {**REQUEST, "input_length": -5}, "`int` >= 1 - at `$.input_length`"),
    (read_trace, REQUEST, {**REQUEST, "input_length": 0, "hash_ids": []}, "`int` >= 1 - at `$.input_length`"),
    (read_trace, REQUEST, {**REQUEST, "output_length": 10**30}, " - at `$.output_length`"),
    (read_trace, REQUEST, {**REQUEST, "output_length": 1.5}, "Expected `int`, got `float`"),
    (read_trace, REQUEST, {**REQUEST, "hash_ids": [0]}, "makes 2 blocks of 512 tokens, but there are 1 hash_ids"),
    (read_trace, REQUEST, {**REQUEST, "hash_ids": [0, 1, 2]}, "there are 3 hash_ids"),
    (read_trace, REQUEST, {**REQUEST, "hash_ids": [0, -1]}, "`int` >= 0 - at `$.hash_ids[1]`"),
    (read_trace, REQUEST, {**REQUEST, "timestamp": "now"}, "Expected `float`, got `str` - at `$.timestamp`"),
    (read_trace, REQUEST, {**REQUEST, "timestamp": 4}, "timestamp 4 is before 5, that of the previous request"),
    (read_trace, REQUEST, {"timestamp": 5, "input_length": 1, "output_length": 1}, "required field `hash_ids`"),
    (read_conversations, MESSAGES, {"messages": "Hi"}, "got `str` - at `$.messages`"),
    (read_conversations, MESSAGES, {"messages": [{"content": "Hi"}]}, "messages[0].role must be a text"),
    (read_conversations, MESSAGES, {"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    (read_conversations, MESSAGES, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content must"),
    (read_conversations, MESSAGES, {"text": "Hi"}, "must have one of messages and conversations"),
    (read_conversations, MESSAGES, {**MESSAGES, **SHAREGPT}, "must have one of messages and conversations"),
    (
        read_conversations,
        SHAREGPT,
        {"conversations": [{"from": "cat", "value": ""}]},
        "from 'cat' is none of human",
    ),
    (read_conversations, SHAREGPT, {"conversations": [{"from": "gpt"}]}, "required field `value`"),
    (read_documents, DOCUMENT, {**DOCUMENT, "context": "more"}, "one of text, context and document"),
    (read_documents, DOCUMENT, {"questions": DOCUMENT["questions"]}, "one of text, context and document"),
    (read_documents, DOCUMENT, {"text": "The key is red.", "questions": []}, "it has no questions"),
]


@pytest.mark.parametrize(("reader", "good", "bad", "fault"), BAD)
def test_a_bad_line_is_an_error_with_file_line_and_fault_or_is_counted(tmp_path, reader, good, bad, fault):
    path = data(tmp_path, good, b"", bad, good)
    message = refusal(reader, path)
    assert message.startswith(f"line 3 of {path} is not {{")
    assert fault in message
    read = reader(path, skip_bad_lines=True)
    assert (len(read.items), read.n_bad_lines) == (2, 1)
    assert read.items == reader(data(tmp_path, good, good)).items


@pytest.mark.parametrize(
    ("name", "line", "sizes"),
    [
        ("fewshot", PROBLEM, {"num_prompts": 1, "num_shots": 0}),
        ("trace", REQUEST, {"num_prompts": 1, "block_len": 512}),
        ("chat", MESSAGES, {"num_sessions": 1}),
        ("agents", MESSAGES, {"num_sessions": 1}),
        ("judge", DOCUMENT, {"num_documents": 1, "num_questions": 1}),
    ],
)
def test_a_workload_refuses_bad_lines_or_counts_them(tmp_path, name, line, sizes):
    path = data(tmp_path, b"{}", line, b"{oops")
    with pytest.raises(ConfigError, match=f"line 1 of {path} is not "):
        make(name, Source(0, path), **sizes)
    loaded = make(name, Source(0, path, skip_bad_lines=True), **sizes)
    assert (len(loaded.sessions), loaded.counts) == (1, {"bad_lines": 2})


def test_a_bad_item_of_an_array_has_its_number(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([SHAREGPT, {"conversations": 3}], indent=1))
    assert refusal(read_conversations, path).startswith(f"item 2 of {path} is not ")
    assert read_conversations(path, skip_bad_lines=True).n_bad_lines == 1


def test_the_error_has_the_line_where_an_array_breaks_off(tmp_path):
    path = tmp_path / "data.json"
    path.write_text("\n[\n" + json.dumps(SHAREGPT) + ",\n{]")
    assert "is not a JSON array: line 4: " in refusal(read_conversations, path, skip_bad_lines=True)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"x":' + b"[" * 100_000])
@pytest.mark.parametrize("reader", [read_problems, read_trace, read_conversations, read_documents])
def test_deeply_nested_items_are_refused(tmp_path, reader, content):
    path = data(tmp_path, content)
    assert "recursion depth" in refusal(reader, path)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"[]"])
def test_an_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    assert " is empty; give a file of " in refusal(read_trace, path, skip_bad_lines=True)


def test_a_file_of_bad_lines_only_is_refused(tmp_path):
    path = data(tmp_path, {"question": 1}, {"question": 2})
    fault = refusal(read_problems, path, skip_bad_lines=True)
    assert f"only bad lines: line 1 of {path} is not" in fault


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    path = tmp_path / "none.jsonl"
    assert refusal(read_problems, path).startswith(f"cannot read the data set {path}: No such file")
    assert str(tmp_path) in refusal(read_problems, tmp_path)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (gzip.compress(b"{}"), "gzip"),
        (b"PAR1 and so on", "Parquet"),
        (json.dumps(PROBLEM).encode("utf-16"), "UTF-16"),
    ],
    ids=["gzip", "Parquet", "UTF-16"],  # gzip output has a time stamp, which would otherwise be in the test name
)
def test_unsupported_file_types_are_named(tmp_path, content, what):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    fault = refusal(read_problems, path, skip_bad_lines=True)
    assert str(path) in fault
    assert what in fault


def test_an_endless_line_is_not_read_to_its_end(tmp_path):
    path = tmp_path / "data.jsonl"
    with path.open("wb") as file:
        file.write(b" {")
        file.truncate(4 * MAX_LINE_BYTES)  # a sparse file
    assert f"line 1 of {path} has more than" in refusal(read_problems, path, skip_bad_lines=True)


@pytest.mark.parametrize(("reader", "expected"), READERS, ids=FORMATS)
@pytest.mark.parametrize(
    ("line", "named"),
    [
        (REQUEST, "--workload trace,"),
        (PROBLEM, "--workload fewshot,"),
        (MESSAGES, "--workload agents,"),
        (SHAREGPT, "--workload agents,"),
        (DOCUMENT, "--workload long-document-qa,"),
    ],
    ids=FORMATS,
)
def test_a_file_of_another_format_is_named(tmp_path, reader, expected, line, named):
    path = data(tmp_path, line, line)
    if line is expected or {*line, *expected} == {"messages", "conversations"}:
        assert len(reader(path).items) == 2
    else:
        fault = refusal(reader, path, skip_bad_lines=True)
        assert str(path) in fault
        assert named in fault
