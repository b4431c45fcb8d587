"""Conversations made of the workloads' problems, with the assistant's reasoning where it thinks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from radixkv.lab.bench.workloads.chat import SmallTalk
from radixkv.lab.bench.workloads.errands import AgentTask, task_messages
from radixkv.lab.bench.workloads.problems import MARK, Problem, result_of
from training.chat_format import Conversation, Message
from training.made_values import listed

NO_STEPS = "This needs no steps."
"""Reasoning before an answer in small talk."""
ALL_RESULTS = "I have all results."
"""Reasoning before the answer from the results of tools."""


def chat_messages(chat: SmallTalk, *, thinks: bool = False) -> list[Message]:
    """Returns the messages of a chat as a client sends them, answers included."""
    reasoning = {"reasoning_content": NO_STEPS} if thinks else {}
    messages: list[Message] = [{"role": "system", "content": chat.system}] if chat.system else []
    for user, assistant in chat.turns:
        messages += [
            {"role": "user", "content": user},
            {"role": "assistant", "content": assistant, **reasoning},
        ]
    return messages


def question_messages(system: str, problems: Iterable[Problem], *, thinks: bool = False) -> list[Message]:
    """Returns a chat in which each question is one user message, followed by its answer.

    An assistant that thinks has the steps to the result in its reasoning.
    """
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for problem in problems:
        answer: dict[str, Any] = {"role": "assistant", "content": problem.answer}
        if thinks:
            answer["reasoning_content"] = problem.answer.partition(MARK)[0].strip()
            answer["content"] = f"The answer is {result_of(problem.answer)}."
        messages += [{"role": "user", "content": problem.question}, answer]
    return messages


def agent_conversation(task: AgentTask) -> Conversation:
    """Returns the conversation of an agent."""
    return Conversation(task_messages(task), task.agent.definitions)


def with_reasoning(conversation: Conversation) -> Conversation:
    """Returns an agent's conversation with reasoning before its calls and its answers."""
    messages = conversation.messages
    reasoned: list[Message] = []
    for index, message in enumerate(messages):
        is_first = messages[index - 1]["role"] == "user"
        if message["role"] == "assistant":
            names = [call["function"]["name"] for call in message.get("tool_calls", ())]
            calling = f"{'I' if is_first else 'Now I'} call {listed(names)}." if names else None
            message = {**message, "reasoning_content": calling or (NO_STEPS if is_first else ALL_RESULTS)}
        reasoned.append(message)
    return conversation._replace(messages=reasoned, enable_thinking=True)


def without_earlier_reasoning(conversation: Conversation) -> Conversation:
    """Returns the conversation without the reasoning of the turns before the last one of the user."""
    messages = conversation.messages
    last = max(index for index, message in enumerate(messages) if message["role"] == "user")
    return conversation._replace(
        messages=[
            {key: value for key, value in message.items() if key != "reasoning_content"}
            if index < last
            else message
            for index, message in enumerate(messages)
        ]
    )
