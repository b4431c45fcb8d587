"""Conversations that a model answers itself: workloads of ``radixkv bench``, as ``drafts.py`` runs them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from recorded import Turn, Workload

from radixkv import LLM, SamplingParams
from radixkv.lab.bench.session import BenchRequest, Reply, Session, ToolCall
from radixkv.lab.bench.workloads.base import Source
from radixkv.lab.bench.workloads.catalog import load_workload
from radixkv.wire.messages import pack_tokens

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""A call as the embedded model writes it."""


def own_answers(names: Sequence[str], dataset: Path | None, model: str, device: str) -> dict[str, Workload]:
    """Returns workloads by name, with the answers of an engine without drafts.

    Args:
        names: shipped workloads, or TOML files. Their answers must be greedy.
        dataset: the data set of their texts; None: they are generated.
        model: answers them.
        device: of the engine.
    """
    with LLM(model, device=device, speculative_config="off") as llm:
        return {
            Path(name).stem: _answer(llm, load_workload(name).make(Source(dataset=dataset)).sessions)
            for name in names
        }


def _answer(llm: LLM, sessions: Sequence[Session]) -> Workload:
    """Answers all sessions side by side, turn after turn."""
    conversations: list[list[Turn]] = [[] for _ in sessions]
    begun = [session.turns() for session in sessions]
    live = [(turns, next(turns), conversation) for turns, conversation in zip(begun, conversations, strict=True)]
    while live:
        requests = [request for _, of_turn, _ in live for request in of_turn]
        outputs = iter(
            llm.generate([_prompt(llm, one) for one in requests], [*map(_params, requests)], use_tqdm=False)
        )
        going_on = []
        for turns, of_turn, conversation in live:
            replies = []
            for _ in of_turn:
                output = next(outputs)
                answer = output.outputs[0]
                conversation.append(Turn(pack_tokens(output.prompt_token_ids), pack_tokens(answer.token_ids)))
                replies.append(_reply(answer.text))
            try:
                going_on.append((turns, turns.send(replies), conversation))
            except StopIteration:
                continue
        live = going_on
    return conversations


def _prompt(llm: LLM, request: BenchRequest) -> str | list[int]:
    if isinstance(request.prompt, list):
        return llm.chat_prompt(request.prompt, tools=request.tools or None)
    return request.prompt if isinstance(request.prompt, str) else list(request.prompt)


def _params(request: BenchRequest) -> SamplingParams:
    if request.n > 1 or request.temperature:
        raise SystemExit("a workload whose answers are sampled has no answers to compare with")
    return SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=request.ignore_eos)


def _reply(text: str) -> Reply:
    found = [json.loads(call) for call in _CALL.findall(text)]
    calls = [ToolCall(call["name"], json.dumps(call["arguments"]), str(index)) for index, call in enumerate(found)]
    return Reply(("" if calls else text,), tuple(calls))
