"""The model as prompts and answers need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from radixkv.errors import InvalidRequest
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import Ready


@dataclass(frozen=True, kw_only=True)
class GenerationModel:
    """What a loaded model says about prompts and answers."""

    ready: Ready
    """The sizes of model and pool."""
    tokenizer: Tokenizer | None
    """None if the checkpoint has no tokenizer; prompts are then token ids."""
    chat_template: ChatTemplate | None = None
    eos_token_ids: frozenset[int] = frozenset()
    """Tokens that end an answer without being in ``stop_token_ids``."""
    default_sampling: Mapping[str, float | int] = field(default_factory=dict)
    """The checkpoint's defaults for sampling fields that a request omits, by their names in
    ``generation_config.json``."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.ready.vocab_size

    @property
    def max_prompt_and_answer(self) -> int:
        """Most tokens of a prompt and one of its answers together."""
        return self.ready.max_prompt_and_answer

    def require_tokenizer(self, field: str) -> Tokenizer:
        """Returns the tokenizer. Raises ``InvalidRequest``, with ``field`` as ``param``, if there is none."""
        if self.tokenizer is None:
            raise InvalidRequest(
                f"{field} needs a tokenizer, and this checkpoint has no tokenizer; set another one (--tokenizer), "
                "or use token ids instead",
                param=field,
            )
        return self.tokenizer
