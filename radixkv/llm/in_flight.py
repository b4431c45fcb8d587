"""A request of ``LLM`` while it runs: messages of the loop in, a ``RequestOutput`` out."""

from __future__ import annotations

import struct

from msgspec.structs import replace

from radixkv.frontend.choice_stream import Choice, Piece, Vocabulary
from radixkv.llm.outputs import CompletionOutput, Logprob, RequestOutput
from radixkv.sampling import SamplingParams
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import Done, NewTokens, PromptLogprobs, Submit, TokenLogprobs, unpack_tokens


class _Part:
    """One of a request's answers so far.

    Where nobody watches it grow and no stop string can end it, what comes is kept as it is until the end: to make
    text and lists of it in every step would take several times as long.
    """

    def __init__(self, sampling: SamplingParams, vocabulary: Vocabulary, *, is_watched: bool) -> None:
        self.piece = Piece()
        """All of it that is not kept for the end."""
        self._keeps = not (is_watched or sampling.stop)
        self._kept_tokens = bytearray()
        self._kept_logprobs: list[TokenLogprobs] = []
        self._choice = Choice(sampling, vocabulary)
        self._tokenizer = vocabulary.tokenizer
        self._logprobs: list[dict[int, Logprob]] | None = None if sampling.logprobs is None else []
        self._cumulative_logprob = 0.0

    def add(self, item: NewTokens) -> bool:
        """Takes what came; whether a stop string ended it, which the loop cannot know. O(new tokens)."""
        if self._keeps:
            self._kept_tokens += item.tokens
            self._kept_logprobs += item.logprobs or ()
            if item.finish_reason is None:
                return False
            item = replace(item, tokens=bytes(self._kept_tokens), logprobs=self._kept_logprobs)
        gained = self._choice.absorb(item)
        self.piece.add(gained)
        if self._logprobs is not None:
            # What comes after a stop string is dropped.
            for token, found in zip(gained.token_ids, item.logprobs or (), strict=False):
                self._logprobs.append(candidates(token, found, self._tokenizer))
                self._cumulative_logprob += found.logprob
        return gained.finish_reason is not None and item.finish_reason is None

    def output(self, index: int) -> CompletionOutput:
        """What there is by now."""
        return CompletionOutput(
            index=index,
            text=self.piece.text,
            token_ids=list(self.piece.token_ids),
            finish_reason=self.piece.finish_reason,
            stop_reason=self.piece.stop_reason,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
        )


class Answer:
    """A request: its choices, and what is known of its prompt.

    Args:
        prompt: the text, if it was given as one.
        submit: what the loop gets.
        vocabulary: the model's.
        is_watched: whether ``output`` is asked for before the end.
    """

    def __init__(
        self, prompt: str | None, submit: Submit, vocabulary: Vocabulary, *, is_watched: bool = False
    ) -> None:
        self.submit = submit
        self.is_done = False
        self._prompt = prompt
        self._prompt_ids = unpack_tokens(submit.tokens)
        self._tokenizer = vocabulary.tokenizer
        sampling = submit.sampling
        self._parts = [_Part(sampling, vocabulary, is_watched=is_watched) for _ in range(sampling.n)]
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if sampling.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(self._prompt_ids)
        self._n_cached = 0

    def add(self, item: NewTokens) -> bool:
        """Takes what a choice gained; whether a stop string ended it, which the loop cannot know."""
        return self._parts[item.choice].add(item)

    def add_prompt(self, item: PromptLogprobs) -> None:
        """Takes how likely a stretch of the prompt was."""
        assert self._prompt_logprobs is not None
        for place, logprobs in enumerate(item.items, item.start):
            self._prompt_logprobs[place] = candidates(self._prompt_ids[place], logprobs, self._tokenizer)

    def finish(self, done: Done) -> None:
        """All choices have ended."""
        self.is_done = True
        self._n_cached = done.n_cached_tokens

    def output(self) -> RequestOutput:
        """What there is by now; unless it is watched, all or nothing. O(its size)."""
        return RequestOutput(
            request_id=self.submit.id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_ids,
            num_cached_tokens=self._n_cached,
            outputs=[part.output(index) for index, part in enumerate(self._parts)],
            prompt_logprobs=self._prompt_logprobs,
            finished=self.is_done,
        )


def candidates(token: int, found: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The token, then the likeliest ones that were asked for, by id."""

    def one(token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, None if tokenizer is None else tokenizer.token_text(token_id))

    likeliest = struct.unpack(f"<{len(found.top_logprobs) // 4}f", found.top_logprobs)
    result = {token: one(token, found.logprob, found.rank)}
    for rank, (token_id, logprob) in enumerate(zip(unpack_tokens(found.top_ids), likeliest, strict=True), 1):
        if token_id != token:
            result[token_id] = one(token_id, logprob, rank)
    return result
