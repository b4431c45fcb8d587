"""``radixkv bench --workload agents`` against a server that calls tools."""

import pytest

from support.agent_oracle import next_reply

FLAGS = ["--workload", "agents", "--num-sessions", 4, "--num-turns", 2, "--num-shots", 1, "--warmup-requests", 0]


@pytest.mark.parametrize("forgets", [False, True])
def test_an_agents_loop_is_run_and_its_accuracy_reported(fake, completed, forgets):
    """A server that forgets the tools' results answers rightly only where they say no more than that it is done."""

    def message(body):
        reply = next_reply(body["messages"])
        return reply.message if reply.tool_calls or not forgets else {"content": "It is so."}

    fake.message = message
    output, line = completed(*FLAGS, "--seed", 3)
    assert (line["failed"], line["completed"]) == (0, line["num_requests"])
    assert line["accuracy_pct"] < 30 if forgets else line["accuracy_pct"] == 100
    assert line["accounting"]["agree"] is True
    assert all(len(body["tools"]) == 3 for body in fake.bodies)
    roles = [message["role"] for message in fake.bodies[-1]["messages"]]
    assert roles.count("tool") >= 2
    assert "accuracy" in output.lower()
