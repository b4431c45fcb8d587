"""Distributions of prompt and answer lengths from files of real data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from radixkv.checkpoints import resolve_tokenizer
from radixkv.errors import ConfigError
from radixkv.lab.bench.workloads.arithmetic import read_problems
from radixkv.lab.bench.workloads.conversations import Conversation, read_conversations
from radixkv.lab.bench.workloads.datasets import MESSAGES, PROBLEMS, SHAREGPT, TRACE, Format, format_of
from radixkv.lab.bench.workloads.mooncake import read_trace
from radixkv.lab.studies.paging.lengths import (
    ChatLengths,
    LengthDistribution,
    LengthPair,
    T,
    WorkloadLengths,
    published_lengths,
)
from radixkv.lab.studies.paging.workloads import WORKLOADS
from radixkv.text.call_forms import CallForm
from radixkv.text.chat_messages import normalize_messages
from radixkv.text.tokenizer import Tokenizer
from radixkv.tree.node import TOKEN_BYTES

USED_BY: Mapping[str, Sequence[str]] = {
    PROBLEMS.name: ("uniform-short", "shared-prefix"),
    TRACE.name: ("variable-length", "parallel-sampling"),
    MESSAGES.name: ("variable-length", "multi-turn", "parallel-sampling"),
}
"""The workloads that draw lengths from each file format; a trace takes precedence over conversations."""

CountTokens = Callable[[str], int]
"""Returns the number of tokens of a text."""


@dataclass(frozen=True)
class RecordedLengths:
    """The length distributions of files."""

    lengths: WorkloadLengths
    """Distributions for the workloads."""
    n_bad_lines: int
    """Malformed lines that were skipped; 0 unless ``skip_bad_lines`` is set."""


def recorded_lengths(
    paths: Sequence[Path],
    tokenizer: str,
    revision: str | None = None,
    *,
    workloads: Sequence[str] = tuple(WORKLOADS),
    skip_bad_lines: bool = False,
) -> RecordedLengths:
    """Returns distributions that draw from the lengths in files; published ones where no file gives lengths.

    Problems give the lengths of short questions, a trace those of requests, and conversations those of chats.
    Without a trace, the first turns of conversations give those of requests. Texts are counted without the tokens
    that a chat template adds. O(size of the files).

    Args:
        paths: at most one file of each format.
        tokenizer: folder or hub name of the tokenizer that counts the tokens of texts.
        revision: revision of the hub repository.
        workloads: names of the workloads that the lengths are for.
        skip_bad_lines: skip and count malformed lines instead of refusing them.

    Raises:
        ConfigError: a file cannot be read, has a malformed line or an unknown format, no workload uses it, or two
            files have the same format.
        CheckpointError: the tokenizer does not exist.
    """
    by_format: dict[str, Path] = {}
    for path in paths:
        name = _format(path).name
        if name in by_format:
            raise ConfigError(f"{by_format[name]} and {path} are both {name}; give one of them as --dataset-path")
        by_format[name] = path
    _check_used(by_format, workloads)
    published = published_lengths()
    problems, requests, chats = published.problems, published.requests, published.chats
    n_bad_lines = 0
    for name, path in sorted(by_format.items(), key=lambda item: item[0] == TRACE.name):  # the trace last
        if name == PROBLEMS.name:
            count = _counter(tokenizer, revision)
            problem_items = read_problems(path, skip_bad_lines=skip_bad_lines)
            pairs = [_problem_lengths(problem.question, problem.answer, count) for problem in problem_items.items]
            problems = _draw_from(path, pairs, tokenizer)
            n_bad_lines += problem_items.n_bad_lines
        elif name == MESSAGES.name:
            count = _counter(tokenizer, revision)
            conversations = read_conversations(path, skip_bad_lines=skip_bad_lines)
            chat_lengths = _answered(path, [_chat_lengths(each, count) for each in conversations.items])
            chats = _draw_from(path, chat_lengths, tokenizer)
            requests = _draw_from(path, [_first_turn(chat) for chat in chat_lengths], tokenizer)
            n_bad_lines += conversations.n_bad_lines
        else:
            trace = read_trace(path, skip_bad_lines=skip_bad_lines)
            requests = _draw_from(path, [LengthPair(each.input_length, each.output_length) for each in trace.items])
            n_bad_lines += trace.n_bad_lines
    return RecordedLengths(WorkloadLengths(problems, requests, chats), n_bad_lines)


def _counter(tokenizer: str, revision: str | None) -> CountTokens:
    loaded = Tokenizer.load(resolve_tokenizer(tokenizer, revision))
    return lambda text: len(loaded.encode(text, adds_special_tokens=False)) // TOKEN_BYTES


def _check_used(by_format: Mapping[str, Path], workloads: Sequence[str]) -> None:
    for name, path in by_format.items():
        used_by = USED_BY[name]
        if name == MESSAGES.name and TRACE.name in by_format:
            used_by = [workload for workload in used_by if workload not in USED_BY[TRACE.name]]
        if not set(used_by) & set(workloads):
            raise ConfigError(
                f"--dataset-path {path} is {name}, which gives lengths to {', '.join(used_by)} and not to "
                f"{', '.join(workloads)}; leave it out, or add one of those to --workloads"
            )


def _draw_from(path: Path, samples: Sequence[T], tokenizer: str | None = None) -> LengthDistribution[T]:
    return LengthDistribution(
        path.name, lambda rng: rng.choice(samples), None if tokenizer is None else Path(tokenizer).name
    )


def _problem_lengths(question: str, answer: str, count: CountTokens) -> LengthPair:
    return LengthPair(max(1, count(question)), max(1, count(answer)))


def _answered(path: Path, chats: Sequence[ChatLengths]) -> list[ChatLengths]:
    answered = [chat for chat in chats if chat.turns]
    if not answered:
        raise ConfigError(f"no conversation of {path} has an answer; give another file")
    return answered


def _chat_lengths(conversation: Conversation, count: CountTokens) -> ChatLengths:
    """Returns the lengths of a chat. The prompt and the answer of a turn may each consist of several messages.

    Assistant messages before any other message belong to the first prompt.
    """
    messages = CallForm().apply(normalize_messages(conversation.messages))
    system = ""
    if messages and messages[0]["role"] == "system":
        system = messages.pop(0)["content"]
    turns: list[LengthPair] = []
    n_before = n_answer = 0
    for message in messages:
        n_tokens = count(_text(message))
        if message["role"] == "assistant" and (n_before or turns):
            n_answer += n_tokens
            continue
        if n_answer:
            turns.append(LengthPair(n_before, n_answer))
            n_before = n_answer = 0
        n_before += n_tokens
    if n_answer:
        turns.append(LengthPair(n_before, n_answer))
    return ChatLengths(system, count(system), tuple(turns))


def _text(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls")
    content: str = message["content"]
    return content if calls is None else content + json.dumps(calls)


def _first_turn(chat: ChatLengths) -> LengthPair:
    first = chat.turns[0]
    return LengthPair(chat.n_system + first.prompt, first.answer)


def _format(path: Path) -> Format:
    """Returns the format of the first item that has a known one; the readers report invalid items before it."""
    try:
        with path.open("rb") as file:
            file_format = next((each for line in file if (each := _format_of(line, file.read)) is not None), None)
    except OSError as error:
        raise ConfigError(f"cannot read --dataset-path {path}: {error.strerror}") from None
    if file_format not in (PROBLEMS, TRACE, MESSAGES, SHAREGPT):
        fault = "has no line like any of" if file_format is None else f"is {file_format.name}, and not one of"
        formats = f"{PROBLEMS.item_format}, {TRACE.item_format} and {MESSAGES.item_format}"
        raise ConfigError(f"--dataset-path {path} {fault} {formats}; give such a file")
    return MESSAGES if file_format == SHAREGPT else file_format


def _format_of(line: bytes, rest: Callable[[], bytes]) -> Format | None:
    """Returns the format of a line, or of the first item of the JSON array that starts there."""
    if not line.lstrip().startswith(b"["):
        return format_of(line)
    try:
        items = msgspec.json.decode(line + rest(), type=list[msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return format_of(bytes(items[0])) if items else None
