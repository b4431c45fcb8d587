"""One request of ``LLM.embed`` or ``LLM.score``: a prompt without an answer."""

from __future__ import annotations

from radixkv.wire.cache_use import CacheUse
from radixkv.wire.messages import Done, NewTokens, PromptLogprobs, Submit, unpack_tokens


class PooledRequest:
    """A prompt, and what the loop reports of its last position.

    Args:
        submit: the message that starts it, with ``pooling``.
    """

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.is_done = False
        self.pooled = b""
        """Little-endian float32, once it is done."""
        self.cache_use = CacheUse()

    @property
    def prompt_token_ids(self) -> list[int]:
        """The ids of the prompt. O(tokens)."""
        return unpack_tokens(self.submit.tokens)

    def add(self, item: NewTokens) -> bool:
        """Takes the report, with which the loop ends the request."""
        self.pooled = item.pooled or b""
        return False

    def add_prompt_logprobs(self, item: PromptLogprobs) -> None:
        """Never called: such a request asks for none."""
        raise AssertionError(f"request {item.id} asks for no prompt logprobs")

    def finish(self, done: Done) -> None:
        """Marks it as done."""
        self.is_done = True
        self.cache_use = done.cache_use
