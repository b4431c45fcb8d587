"""Helpers that run benchmark sessions without a server."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from radixkv.lab.bench.session import BenchRequest, Reply, Session
from radixkv.lab.bench.workloads.base import Source, WorkloadSessions
from radixkv.lab.bench.workloads.catalog import load_workload
from support.json_lines import write_lines

GENERATED = Source()

AnswerFunction = Callable[[BenchRequest], Sequence[str] | Reply]
"""Returns the texts of a request's choices, or the whole reply."""


def make(name: str, source: Source = GENERATED, **changes: Any) -> WorkloadSessions:
    """Returns the sessions of a shipped workload with these parameters changed."""
    return load_workload(name, **changes).make(source)


def write_documents(folder: Path, counts: Sequence[int]) -> Path:
    """Writes a data set of documents with so many questions each."""
    questions = [
        [{"question": f"q{number}.{n}?", "answer": f"a{number}.{n}"} for n in range(count)]
        for number, count in enumerate(counts)
    ]
    lines = [{"text": f"Text {number}.", "questions": each} for number, each in enumerate(questions)]
    return write_lines(folder / "documents.jsonl", *lines)


def said(*texts: str) -> Reply:
    """Returns a reply whose choices have these texts."""
    return Reply(texts)


def answer_yes(request: BenchRequest) -> Sequence[str]:
    """Gives the same answer to every request."""
    return ["Yes."] * request.n


def collect_turns(session: Session, answer: AnswerFunction = answer_yes) -> list[list[BenchRequest]]:
    """Runs a session with the given answers; returns the requests of each turn."""
    turn_generator, replies = session.turns(), None
    turns = []
    while True:
        try:
            requests = list(next(turn_generator) if replies is None else turn_generator.send(replies))
        except StopIteration:
            return turns
        turns.append(requests)
        answers = map(answer, requests)
        replies = [answered if isinstance(answered, Reply) else Reply(tuple(answered)) for answered in answers]


def collect_requests(sessions: Sequence[Session], answer: AnswerFunction = answer_yes) -> list[BenchRequest]:
    """Returns the requests of all turns of all sessions."""
    return [request for session in sessions for turn in collect_turns(session, answer) for request in turn]


def comparable_fields(request: BenchRequest) -> tuple:
    """Returns the fields of a request without its check, a function that never compares equal."""
    return request.prompt, request.output_len, request.n, request.temperature, request.seed


def common_prefix(texts: Sequence[str]) -> str:
    """Returns the longest common prefix."""
    first, last = min(texts), max(texts)  # all others sort between them
    n_shared = 0
    while n_shared < len(first) and first[n_shared] == last[n_shared]:
        n_shared += 1
    return first[:n_shared]
