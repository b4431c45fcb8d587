"""The part of a response that comes from the prompt: its echo and its logprobs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from radixkv.frontend.answers import PromptAnswers
from radixkv.frontend.api.openai.logprobs import RenderedToken, prompt_entry
from radixkv.frontend.chat import ChatPrompt
from radixkv.generation.detokenizer import IncrementalDetokenizer
from radixkv.generation.logprobs import TokenRenderer
from radixkv.generation.models import GenerationModel
from radixkv.generation.output import OutputDelta
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import Submit, TokenLogprobs, unpack_tokens


class PromptWithLogprobs(PromptAnswers[RenderedToken]):
    """A prompt with its answers, the echo and the prompt logprobs that its request asks for.

    Args:
        prompt: as it was submitted.
        model: provides the tokenizer.
        n_top: how many of the likeliest tokens each of ``entries`` has; None for no entries.
        echo: the prompt's text, if choices begin with it.
        render_token: renders tokens' logprobs, also of the echo; None if the response shows none.
        chat: splits the text of answers into parts, and keeps them for later turns; None for a prompt of no chat.
        generates: False leaves out the token that had to be generated, because only the prompt is wanted.
        is_for_cache: whether it is wanted for the cache: the response comes once all tiers have it.
    """

    def __init__(
        self,
        prompt: Submit,
        model: GenerationModel,
        *,
        n_top: int | None,
        echo: str | None,
        render_token: TokenRenderer[RenderedToken] | None,
        chat: ChatPrompt | None,
        generates: bool,
        is_for_cache: bool = False,
    ) -> None:
        self.echo = _without_partial(echo or "", prompt, model.tokenizer)
        """The text that choices begin with, without a character that they may complete."""
        super().__init__(
            prompt,
            model,
            render_token,
            chat=chat,
            first_offset=len(self.echo),
            repeats_partial=echo is not None,
            generates=generates,
            is_for_cache=is_for_cache,
        )
        if echo is None:
            render_token = None
        self.entries: list[msgspec.Raw | None] | None = None if n_top is None else [None]
        """vLLM's ``prompt_logprobs``: one entry per token, None for the first."""
        self._n_top = n_top or 0
        self._tokenizer = model.tokenizer
        self._render_token = render_token
        self._rendered: list[RenderedToken] = []
        self._ids = unpack_tokens(prompt.tokens) if n_top is not None or render_token is not None else []
        self._n_absorbed = 1
        self._text: IncrementalDetokenizer | None = None
        if model.tokenizer is not None and render_token is not None:
            self._text = IncrementalDetokenizer(model.tokenizer, skip_special_tokens=False)
        if render_token is not None:
            self._add_rendered(render_token, self._ids[0], None)

    @property
    def prefix_output(self) -> OutputDelta[RenderedToken]:
        """The output that every choice begins with."""
        output = OutputDelta(logprobs=list(self._rendered))
        output.add_text(self.echo)
        return output

    def absorb_prompt_logprobs(self, token_logprobs: Sequence[TokenLogprobs]) -> None:
        """Adds the logprobs of the next tokens, from the prompt's second on."""
        tokens = self._ids[self._n_absorbed : self._n_absorbed + len(token_logprobs)]
        self._n_absorbed += len(tokens)
        for token, logprobs in zip(tokens, token_logprobs, strict=True):
            if self.entries is not None:
                self.entries.append(prompt_entry(self._tokenizer, token, logprobs, self._n_top))
            if self._render_token is not None:
                self._add_rendered(self._render_token, token, logprobs)

    def _add_rendered(
        self, render_token: TokenRenderer[RenderedToken], token: int, token_logprobs: TokenLogprobs | None
    ) -> None:
        offset = 0 if self._text is None else self._text.n_characters
        self._rendered.append(
            render_token(self._tokenizer, token, offset, token_logprobs, self.prompt.sampling.logprobs or 0)
        )
        if self._text is not None and self._is_echoed(token, offset):
            self._text.push([token])

    def _is_echoed(self, token: int, offset: int) -> bool:
        """Returns whether the echoed text contains the token.

        It lacks the special tokens that the tokenizer adds to a text.
        """
        assert self._tokenizer is not None
        if self._tokenizer.token(token) is not None:
            return True
        name = self._tokenizer.token(token, skip_special_tokens=False)
        # The offset does not count an incomplete character before the token yet.
        return name is not None and self.echo.startswith((name, f"\N{REPLACEMENT CHARACTER}{name}"), offset)


def _without_partial(text: str, prompt: Submit, tokenizer: Tokenizer | None) -> str:
    """Returns a prompt's text without the U+FFFD at its end that stand for an incomplete character."""
    if tokenizer is None or not text:
        return text
    skip_special_tokens = prompt.sampling.skip_special_tokens
    detokenizer = IncrementalDetokenizer(tokenizer, prompt.tokens, skip_special_tokens=skip_special_tokens)
    return text[: len(text) - detokenizer.n_partial]
