"""Sessions whose turns depend on the tool calls in the answers."""

import json

import pytest

from radixkv.lab.bench.session import BenchRequest, Session
from support.loads import send

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
QUESTION = {"role": "user", "content": "What is 2 + 3, and 4 + 5?"}


def call(number, arguments):
    return {"id": f"call-{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}


ASKING = {
    "role": "assistant",
    "content": "Let me add.",
    "reasoning_content": "Two sums.",
    "tool_calls": [call(0, '{"a": 2, "b": 3}'), call(1, '{"b": 5, "a": 4}')],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "call-0", "content": "5"},
    {"role": "tool", "tool_call_id": "call-1", "content": "9"},
]


def answer(body):
    """Asks for two sums, then tells the results."""
    results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
    return {"content": f"They are {' and '.join(results)}."} if results else ASKING


def calculator():
    """Returns a session that adds what the model asks for, until the model asks for nothing."""

    def turns():
        messages = [QUESTION]
        while True:
            request = BenchRequest(list(messages), 50, check=is_right, ignore_eos=False, tools=[TOOL])
            (reply,) = yield (request,)
            if not reply.tool_calls:
                return
            messages.append(reply.message)
            for made in reply.tool_calls:
                result = sum(json.loads(made.arguments).values())
                messages.append({"role": "tool", "tool_call_id": made.id, "content": str(result)})

    return Session(turns, n_requests=2)


def is_right(reply):
    return None if reply.tool_calls else reply.texts[0] == "They are 5 and 9."


@pytest.mark.parametrize("returns_ids", [False, True])
def test_results_of_streamed_calls_go_back_until_an_answer_has_none(fake, returns_ids):
    fake.message, fake.returns_ids = answer, returns_ids
    first, second = send(fake.address, [calculator()]).records
    assert [body["messages"] for body in fake.bodies] == [[QUESTION], [QUESTION, ASKING, *RESULTS]]
    assert all(body["tools"] == [TOOL] and "ignore_eos" not in body for body in fake.bodies)
    assert (first.error, second.error) == (None, None)
    assert (first.texts, second.texts) == (("Let me add.",), ("They are 5 and 9.",))
    assert (first.is_correct, second.is_correct) == (None, True)
    assert len(first.arrivals) == first.n_output_tokens > 20


def test_a_session_may_have_fewer_turns_or_more_than_with_correct_answers(fake):
    fake.message = lambda body: {"content": "Nine."}
    (record,) = send(fake.address, [calculator()]).records
    assert (record.error, record.is_correct) == (None, False)
    fake.message = lambda body: ASKING if len(body["messages"]) < 5 else answer(body)
    records = send(fake.address, [calculator()]).records
    assert [(record.turn, record.error, record.is_correct) for record in records] == [
        (0, None, None),
        (1, None, None),
        (2, None, False),
    ]
