"""What messages, and adapters that go, do with pins and sessions."""

from __future__ import annotations

from collections.abc import Callable

from radixkv.errors import SessionNotFound, shortened
from radixkv.runtime.intake import Intake
from radixkv.runtime.lifetimes.pins import Pins
from radixkv.runtime.lifetimes.sessions import Sessions
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.wire.cache_messages import CloseSession, Pin, Pinned, SessionClosed
from radixkv.wire.request_limits import check_ttl


def pin(intake: Intake, pins: Pins, message: Pin) -> Pinned:
    """Pins a prompt, or ends its pin. O(tokens). Raises ``RequestError``."""
    intake.check_prompt(message.tokens)
    namespace, key, _ = intake.prompt_key(message.namespace, message.tokens)
    check_ttl(message.ttl_s, "ttl")
    pins.check_available("ttl")
    if message.ttl_s:
        pins.pin(namespace, key, message.ttl_s)
    else:
        pins.unpin(namespace, key)
    pinned = pins.find(namespace, key)
    return Pinned(message.id, len(message.tokens) // TOKEN_BYTES, pinned.n_tokens, pinned.seconds_left)


def end_of_adapter(
    pins: Pins, sessions: Sessions, adapter: str, *, leave: Callable[[Namespace, str], None]
) -> None:
    """Ends the pins and closes the sessions of an adapter that is freed: nobody can name them any more.

    Those of an activated LoRA are the model's, and stay. O(sessions), and what ending and closing costs.

    Args:
        pins: has the pins.
        sessions: has the sessions.
        adapter: its digest.
        leave: ends what waits for a session's next turn.
    """
    pins.end_of(adapter)
    for namespace, session_id in sessions.of_adapter(adapter):
        leave(namespace, session_id)
        sessions.close(namespace, session_id)


def close_session(
    intake: Intake, sessions: Sessions, message: CloseSession, *, leave: Callable[[Namespace, str], None]
) -> SessionClosed:
    """Closes a session. O(pages). Raises ``RequestError``.

    Args:
        intake: checks the salt.
        sessions: has the session.
        message: names it.
        leave: ends what waits for its next turn.
    """
    namespace = intake.namespace(message.namespace)
    leave(namespace, message.session_id)
    demoted = sessions.close(namespace, message.session_id)
    if demoted is None:
        raise SessionNotFound(
            f"there is no session {shortened(message.session_id)} with this cache_salt: no request had its id, "
            "or it was closed, or forgotten for many newer ones",
            param="session_id",
        )
    return SessionClosed(message.id, *demoted)
