"""What the server serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from radixkv.frontend.batch_tokenizer import Encoder
from radixkv.frontend.serial_executor import Alone
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import Ready


@dataclass(frozen=True)
class Served:
    """The one model that is served."""

    name: str
    root: str
    """What the user asked for: a folder or a hub name."""
    ready: Ready
    tokenizer: Tokenizer | None
    """None: the checkpoint has none, and prompts are token ids."""
    eos_token_ids: frozenset[int]
    created: int
    """Seconds since 1970."""
    longest_token_characters: int | None = None
    """The tokenizer's; None refuses no text unread."""
    chat_template: ChatTemplate | None = None
    default_sampling: Mapping[str, float | int] = field(default_factory=dict)
    """What the checkpoint recommends for fields that a request leaves out; ``max_new_tokens`` limits answers."""
    alone: Alone = field(default_factory=Alone)
    """Where long texts are encoded, which takes hundreds of bytes of memory for each token."""

    @cached_property
    def encoder(self) -> Encoder:
        """Encodes texts that are not long. There must be a tokenizer."""
        assert self.tokenizer is not None
        return Encoder(self.tokenizer, self.max_prompt_and_answer)

    @property
    def max_prompt_and_answer(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self.ready.max_prompt_and_answer

    @property
    def narrowness(self) -> str | None:
        """Why requests may have fewer tokens than ``max_model_len``; None if they may not."""
        if self.max_prompt_and_answer == self.ready.max_model_len:
            return None
        return f"the pool holds {self._n_pool_tokens} tokens, fewer than max_model_len {self.ready.max_model_len}"

    @property
    def warnings(self) -> list[str]:
        """What whoever starts the server may not have meant, each in one line."""
        lines = []
        if self.narrowness is not None:
            lines.append(f"{self.narrowness}: longer requests are refused")
        if self.tokenizer is None:
            lines.append(f"{self.root} has no tokenizer.json: prompts are token ids, unless --tokenizer is given")
        return lines

    @property
    def _n_pool_tokens(self) -> int:
        return self.ready.n_pages * self.ready.page_size
