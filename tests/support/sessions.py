"""Sessions driven without a server."""

from collections.abc import Callable, Sequence

from radixkv.bench.session import Reply, Request, Session

Answer = Callable[[Request], Sequence[str]]
"""Gives the texts of a request's choices."""


def yes(request: Request) -> Sequence[str]:
    """The same answer to everything."""
    return ["Yes."] * request.n


def turns_of(session: Session, answer: Answer = yes) -> list[list[Request]]:
    """The requests of each turn, when they are answered so."""
    turns, replies = session.turns(), None
    asked = []
    while True:
        try:
            requests = list(next(turns) if replies is None else turns.send(replies))
        except StopIteration:
            return asked
        asked.append(requests)
        replies = [Reply(tuple(answer(request))) for request in requests]


def requests_of(sessions: Sequence[Session], answer: Answer = yes) -> list[Request]:
    """Of all turns of all sessions."""
    return [request for session in sessions for turn in turns_of(session, answer) for request in turn]


def facts_of(request: Request) -> tuple:
    """All of a request but its check, which is a function: two are never equal."""
    return request.prompt, request.output_len, request.n, request.temperature, request.seed


def shared_beginning(texts: Sequence[str]) -> str:
    """The longest text that all begin with."""
    first, last = min(texts), max(texts)  # all others are between them
    n_shared = 0
    while n_shared < len(first) and first[n_shared] == last[n_shared]:
        n_shared += 1
    return first[:n_shared]
