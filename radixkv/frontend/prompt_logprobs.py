"""What is shown of a prompt itself."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from radixkv.frontend.choice_stream import Piece
from radixkv.frontend.in_flight import Prompt
from radixkv.frontend.logprobs import ShownToken, ShowToken, prompt_entry
from radixkv.frontend.served_model import Served
from radixkv.text.detokenizer import IncrementalDecoder
from radixkv.wire import TokenLogprobs, unpack_tokens


class ScoredPrompt:
    """A prompt's text and its tokens' log-probabilities, as far as they are asked for.

    Args:
        prompt: as it was submitted.
        served: says the tokenizer.
        n_entries: how many of the likeliest tokens ``entries`` have; None for no entries.
        echo: the text that choices begin with.
        show: makes what an echoed choice shows of its tokens; None: nothing.
    """

    def __init__(
        self,
        prompt: Prompt,
        served: Served,
        *,
        n_entries: int | None,
        echo: str,
        show: ShowToken | None,
    ) -> None:
        self.prompt = prompt
        self.echo = echo
        self.entries: list[msgspec.Raw | None] | None = None if n_entries is None else [None]
        """vLLM's ``prompt_logprobs``: one a token, None for the first."""
        self._n_entries = n_entries or 0
        self._tokenizer = served.tokenizer
        self._show = show
        self._shown: list[ShownToken] = []
        self._ids = unpack_tokens(prompt.tokens) if n_entries is not None or show is not None else []
        self._n_absorbed = 1
        self._text: IncrementalDecoder | None = None
        if served.tokenizer is not None:
            self._text = IncrementalDecoder(served.tokenizer, skip_special_tokens=False)
        if show is not None:
            self._add_shown(show, self._ids[0], None)

    @property
    def beginning(self) -> Piece:
        """What every choice begins with."""
        return Piece(text=self.echo, logprobs=list(self._shown))

    def absorb(self, figures: Sequence[TokenLogprobs]) -> None:
        """Takes those of the next tokens, from the second on."""
        tokens = self._ids[self._n_absorbed : self._n_absorbed + len(figures)]
        self._n_absorbed += len(tokens)
        for token, one in zip(tokens, figures, strict=True):
            if self.entries is not None:
                self.entries.append(prompt_entry(self._tokenizer, token, one, self._n_entries))
            if self._show is not None:
                self._add_shown(self._show, token, one)

    def _add_shown(self, show: ShowToken, token: int, figures: TokenLogprobs | None) -> None:
        offset = 0 if self._text is None else self._text.n_characters
        self._shown.append(show(self._tokenizer, token, offset, figures, self.prompt.sampling.logprobs or 0))
        if self._text is not None and self._is_echoed(token, offset):
            self._text.push([token])

    def _is_echoed(self, token: int, offset: int) -> bool:
        """Whether the echoed text has it: the special tokens that the tokenizer adds to a text are not there."""
        assert self._tokenizer is not None
        if self._tokenizer.token(token) is not None:
            return True
        name = self._tokenizer.token(token, skip_special_tokens=False)
        # A character that is cut off before it is not in the offset yet.
        return name is not None and self.echo.startswith((name, f"\N{REPLACEMENT CHARACTER}{name}"), offset)
