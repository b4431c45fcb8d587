"""The model that the server serves, with its tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from radixkv.frontend.batch_tokenizer import BatchTokenizer
from radixkv.frontend.serial_executor import SerialExecutor
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import Ready


@dataclass(frozen=True)
class ServedModel:
    """The one model of the server."""

    name: str
    root: str
    """The folder or hub name that the user gave."""
    ready: Ready
    tokenizer: Tokenizer | None
    """None if the checkpoint has no tokenizer; prompts are then token ids."""
    eos_token_ids: frozenset[int]
    created: int
    """When the server loaded the model, in seconds since 1970."""
    max_token_characters: int | None = None
    """Most characters of one token. None if unknown: then no text is refused before it is tokenized."""
    chat_template: ChatTemplate | None = None
    default_sampling: Mapping[str, float | int] = field(default_factory=dict)
    """The checkpoint's defaults for sampling fields that a request omits; ``max_new_tokens`` caps every answer."""
    serial: SerialExecutor = field(default_factory=SerialExecutor)
    """Runs long tokenizing and rendering one call at a time: tokenizing takes hundreds of bytes of memory per
    token."""

    @cached_property
    def batch_tokenizer(self) -> BatchTokenizer:
        """Tokenizes texts of moderate length. Requires a tokenizer."""
        assert self.tokenizer is not None
        return BatchTokenizer(self.tokenizer, self.max_prompt_and_answer)

    @property
    def max_prompt_and_answer(self) -> int:
        """Most tokens of a prompt and one of its answers together."""
        return self.ready.max_prompt_and_answer

    @property
    def pool_limit(self) -> str | None:
        """The reason why the context is shorter than ``max_model_len``; None if it is not."""
        if self.max_prompt_and_answer == self.ready.max_model_len:
            return None
        return f"the pool holds {self._n_pool_tokens} tokens, fewer than max_model_len {self.ready.max_model_len}"

    @property
    def warnings(self) -> list[str]:
        """Consequences of the settings that the user may not have intended, one line each."""
        lines = []
        if self.pool_limit is not None:
            lines.append(f"{self.pool_limit}: longer requests are refused")
        if self.tokenizer is None:
            lines.append(f"{self.root} has no tokenizer.json: prompts are token ids, unless --tokenizer is given")
        return lines

    @property
    def _n_pool_tokens(self) -> int:
        return self.ready.n_pages * self.ready.page_size
