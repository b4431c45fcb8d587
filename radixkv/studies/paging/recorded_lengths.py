"""How long prompts and answers are in files of real data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from radixkv.bench.workloads.datasets.conversations import Conversation, read_conversations
from radixkv.bench.workloads.datasets.formats import MESSAGES, PROBLEMS, SHAREGPT, TRACE, Format, format_of
from radixkv.bench.workloads.datasets.gsm8k import read_problems
from radixkv.bench.workloads.datasets.mooncake import read_trace
from radixkv.checkpoints import resolve_tokenizer
from radixkv.errors import ConfigError
from radixkv.studies.paging.lengths import AllLengths, Chat, Lengths, Pair, T, published_lengths
from radixkv.studies.paging.workloads import WORKLOADS
from radixkv.text.messages import plain_messages
from radixkv.text.tokenizer import Tokenizer
from radixkv.tree.node import TOKEN_BYTES

USED_BY: Mapping[str, Sequence[str]] = {
    PROBLEMS.name: ("uniform-short", "shared-prefix"),
    TRACE.name: ("variable-length", "parallel-sampling"),
    MESSAGES.name: ("variable-length", "multi-turn", "parallel-sampling"),
}
"""The workloads that draw lengths from a kind of file; a trace goes before conversations."""

Count = Callable[[str], int]
"""How many tokens a text has."""


@dataclass(frozen=True)
class Recorded:
    """What files hold."""

    lengths: AllLengths
    n_bad_lines: int
    """Left out; 0 unless that was asked for."""


def recorded_lengths(
    paths: Sequence[Path],
    tokenizer: str,
    revision: str | None = None,
    *,
    workloads: Sequence[str] = tuple(WORKLOADS),
    skip_bad_lines: bool = False,
) -> Recorded:
    """The lengths that files have, drawn at random, and published ones where no file has any.

    Problems give short questions, a trace requests, conversations chats and, without a trace, their first turns as
    requests. Texts are counted without what a chat template puts around them. O(files).

    Args:
        paths: at most one of each kind.
        tokenizer: the folder or hub name of the tokenizer that counts, if there are texts to count.
        revision: a hub repository's.
        workloads: the names of those that the lengths are for.
        skip_bad_lines: count bad lines instead of refusing them.

    Raises:
        ConfigError: a file cannot be read, has a bad line, or is of no known kind or one that no workload uses, or
            two are of one kind.
        CheckpointError: there is no such tokenizer.
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
    for name, path in sorted(by_format.items(), key=lambda known: known[0] == TRACE.name):  # the trace last
        if name == PROBLEMS.name:
            count = _counter(tokenizer, revision)
            of_problems = read_problems(path, skip_bad_lines=skip_bad_lines)
            found = [_problem(one.question, one.answer, count) for one in of_problems.items]
            problems = _drawn(path, found, tokenizer)
            n_bad_lines += of_problems.n_bad_lines
        elif name == MESSAGES.name:
            count = _counter(tokenizer, revision)
            said = read_conversations(path, skip_bad_lines=skip_bad_lines)
            of_chats = _answered(path, [_chat(conversation, count) for conversation in said.items])
            chats = _drawn(path, of_chats, tokenizer)
            requests = _drawn(path, [_first_turn(chat) for chat in of_chats], tokenizer)
            n_bad_lines += said.n_bad_lines
        else:
            of_trace = read_trace(path, skip_bad_lines=skip_bad_lines)
            requests = _drawn(path, [Pair(one.input_length, one.output_length) for one in of_trace.items])
            n_bad_lines += of_trace.n_bad_lines
    return Recorded(AllLengths(problems, requests, chats), n_bad_lines)


def _counter(tokenizer: str, revision: str | None) -> Count:
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


def _drawn(path: Path, found: Sequence[T], tokenizer: str | None = None) -> Lengths[T]:
    return Lengths(path.name, lambda rng: rng.choice(found), None if tokenizer is None else Path(tokenizer).name)


def _problem(question: str, answer: str, count: Count) -> Pair:
    return Pair(max(1, count(question)), max(1, count(answer)))


def _answered(path: Path, chats: Sequence[Chat]) -> list[Chat]:
    answered = [chat for chat in chats if chat.turns]
    if not answered:
        raise ConfigError(f"no conversation of {path} has an answer; give another file")
    return answered


def _chat(conversation: Conversation, count: Count) -> Chat:
    """A turn is what is said until the assistant answers, and that answer; both may be several messages.

    What the assistant says before anybody else belongs to the first prompt.
    """
    messages = plain_messages(conversation.messages)
    system = ""
    if messages and messages[0]["role"] == "system":
        system = messages.pop(0)["content"]
    turns: list[Pair] = []
    n_before = n_answer = 0
    for message in messages:
        n_tokens = count(_text(message))
        if message["role"] == "assistant" and (n_before or turns):
            n_answer += n_tokens
            continue
        if n_answer:
            turns.append(Pair(n_before, n_answer))
            n_before = n_answer = 0
        n_before += n_tokens
    if n_answer:
        turns.append(Pair(n_before, n_answer))
    return Chat(system, count(system), tuple(turns))


def _text(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    content: str = message["content"]
    return content if calls is None else content + json.dumps(calls)


def _first_turn(chat: Chat) -> Pair:
    first = chat.turns[0]
    return Pair(chat.n_system + first.prompt, first.answer)


def _format(path: Path) -> Format:
    """What the first item is that can be told; the readers say what is wrong with those before it."""
    try:
        with path.open("rb") as file:
            found = next((each for line in file if (each := _format_of(line, file.read)) is not None), None)
    except OSError as error:
        raise ConfigError(f"cannot read --dataset-path {path}: {error.strerror}") from None
    if found not in (PROBLEMS, TRACE, MESSAGES, SHAREGPT):
        what = "has nothing of" if found is None else f"is {found.name}, and none of"
        shapes = f"{PROBLEMS.shape}, {TRACE.shape} and {MESSAGES.shape}"
        raise ConfigError(f"--dataset-path {path} {what} {shapes}; give such a file")
    return MESSAGES if found == SHAREGPT else found


def _format_of(line: bytes, rest: Callable[[], bytes]) -> Format | None:
    """Of a line, or of the array that begins there."""
    if not line.lstrip().startswith(b"["):
        return format_of(line)
    try:
        items = msgspec.json.decode(line + rest(), type=list[msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return format_of(bytes(items[0])) if items else None
