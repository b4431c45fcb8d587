"""The model as prompts and answers need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from radixkv.errors import InvalidRequest, UnsupportedFeature
from radixkv.generation.parsers.answer_format import AnswerFormat
from radixkv.generation.tools import ToolUse
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import Ready, pack_tokens
from radixkv.wire.request_limits import check_ids
from radixkv.wire.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class GenerationModel:
    """What a loaded model says about prompts and answers."""

    ready: Ready
    """The sizes of model and pool."""
    tokenizer: Tokenizer | None
    """None if the checkpoint has no tokenizer; prompts are then token ids."""
    chat_template: ChatTemplate | None = None
    answer_format: AnswerFormat | None = None
    """How the model writes calls of tools and reasoning; None if it has neither."""
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

    def encode_ids(self, ids: Sequence[int]) -> bytes:
        """Returns a prompt of token ids as little-endian int32. O(ids).

        Raises:
            InvalidRequest: they are not integers, or outside the vocabulary.
        """
        try:
            tokens = pack_tokens(ids)
        except (TypeError, OverflowError) as error:
            raise InvalidRequest(
                f"a prompt is neither text nor int32 token ids: {error}", param="prompt"
            ) from error
        check_ids(ids, self.vocab_size, "prompt")
        return tokens

    def check_tools(self, tools: ToolUse) -> None:
        """Raises ``UnsupportedFeature`` if calls are wanted and the model has no format of them."""
        if tools.mode != "none" and (self.answer_format is None or not self.answer_format.has_tools):
            raise UnsupportedFeature(
                "tools need a model with a format of tool calls, and this model's chat template shows none; leave "
                "tools out, or name the format when starting the server (--tool-call-parser)",
                param="tools",
            )

    def constrained(
        self,
        sampling: SamplingParams,
        prompt: str,
        tools: ToolUse,
        variables: Mapping[str, Any] | None = None,
    ) -> SamplingParams:
        """Returns the sampling parameters with what the whole answer must match: reasoning, calls and text.

        Args:
            sampling: as requested, perhaps with a format for the answer's text.
            prompt: the rendered prompt.
            tools: the tools of the request.
            variables: those that the request set for the chat template.

        Raises:
            InvalidRequest: as ``AnswerFormat.constraint``.
        """
        if self.answer_format is None:
            return sampling
        constraint = self.answer_format.constraint(prompt, tools, sampling.structured_outputs, variables)
        if constraint is sampling.structured_outputs:
            return sampling
        return msgspec.structs.replace(sampling, structured_outputs=constraint)
