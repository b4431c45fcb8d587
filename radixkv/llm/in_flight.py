"""A request of ``LLM`` while it runs, which turns the loop's messages into a ``RequestOutput``."""

from __future__ import annotations

import struct

from msgspec.structs import replace

from radixkv.frontend.choice_stream import ChoiceStream, OutputDelta, Vocabulary
from radixkv.llm.outputs import CompletionOutput, Logprob, RequestOutput
from radixkv.sampling import SamplingParams
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import Done, NewTokens, PromptLogprobs, Submit, TokenLogprobs, unpack_tokens


class _OutputBuilder:
    """Accumulates one of a request's ``n`` answers.

    An answer that is not streamed and has no stop strings is collected as raw tokens and detokenized at the end:
    building text and lists in every step would take several times as long.
    """

    def __init__(self, sampling: SamplingParams, vocabulary: Vocabulary, *, is_streamed: bool) -> None:
        self._accumulated = OutputDelta()
        """The answer so far, without the deferred tokens."""
        self._is_deferred = not (is_streamed or sampling.stop)
        self._deferred_tokens = bytearray()
        self._deferred_logprobs: list[TokenLogprobs] = []
        self._stream = ChoiceStream(sampling, vocabulary)
        self._tokenizer = vocabulary.tokenizer
        self._logprobs: list[dict[int, Logprob]] | None = None if sampling.logprobs is None else []
        self._cumulative_logprob = 0.0

    def add(self, item: NewTokens) -> bool:
        """Adds new tokens. O(new tokens).

        Returns:
            Whether a stop string ended the answer; the loop does not see text and must be told.
        """
        if self._is_deferred:
            self._deferred_tokens += item.tokens
            self._deferred_logprobs += item.logprobs or ()
            if item.finish_reason is None:
                return False
            item = replace(item, tokens=bytes(self._deferred_tokens), logprobs=self._deferred_logprobs)
        delta = self._stream.absorb(item)
        self._accumulated.add(delta)
        if self._logprobs is not None:
            # Tokens after a stop string are dropped, so there may be more logprobs than tokens.
            for token, logprobs in zip(delta.token_ids, item.logprobs or (), strict=False):
                self._logprobs.append(logprobs_by_token(token, logprobs, self._tokenizer))
                self._cumulative_logprob += logprobs.logprob
        return delta.finish_reason is not None and item.finish_reason is None

    def output(self, index: int) -> CompletionOutput:
        """Returns the answer so far."""
        return CompletionOutput(
            index=index,
            text=self._accumulated.text,
            token_ids=list(self._accumulated.token_ids),
            finish_reason=self._accumulated.finish_reason,
            stop_reason=self._accumulated.stop_reason,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
        )


class OfflineRequest:
    """One request of ``LLM``: its prompt and its ``n`` answers.

    Args:
        prompt: the prompt's text; None if it was given as token ids.
        submit: the message that starts the request in the loop.
        vocabulary: the model's tokenizer and end-of-sequence ids.
        is_streamed: whether ``output`` is called before the end.
    """

    def __init__(
        self, prompt: str | None, submit: Submit, vocabulary: Vocabulary, *, is_streamed: bool = False
    ) -> None:
        self.submit = submit
        self.is_done = False
        self._prompt = prompt
        self._prompt_ids = unpack_tokens(submit.tokens)
        self._tokenizer = vocabulary.tokenizer
        sampling = submit.sampling
        self._builders = [_OutputBuilder(sampling, vocabulary, is_streamed=is_streamed) for _ in range(sampling.n)]
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if sampling.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(self._prompt_ids)
        self._n_cached = 0

    def add(self, item: NewTokens) -> bool:
        """Adds new tokens of one answer; returns whether a stop string ended it."""
        return self._builders[item.choice].add(item)

    def add_prompt_logprobs(self, item: PromptLogprobs) -> None:
        """Adds the logprobs of a range of prompt tokens."""
        assert self._prompt_logprobs is not None
        for position, logprobs in enumerate(item.items, item.start):
            self._prompt_logprobs[position] = logprobs_by_token(
                self._prompt_ids[position], logprobs, self._tokenizer
            )

    def finish(self, done: Done) -> None:
        """Marks the request as done; all its answers have ended."""
        self.is_done = True
        self._n_cached = done.n_cached_tokens

    def output(self) -> RequestOutput:
        """Returns the request's output so far; deferred answers are empty before their end. O(its size)."""
        return RequestOutput(
            request_id=self.submit.id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_ids,
            num_cached_tokens=self._n_cached,
            outputs=[builder.output(index) for index, builder in enumerate(self._builders)],
            prompt_logprobs=self._prompt_logprobs,
            finished=self.is_done,
        )


def logprobs_by_token(token: int, logprobs: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Returns logprobs by token id: first the token's own, then those of the requested most likely tokens."""

    def make_logprob(token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, None if tokenizer is None else tokenizer.token_text(token_id))

    top_logprobs = struct.unpack(f"<{len(logprobs.top_logprobs) // 4}f", logprobs.top_logprobs)
    result = {token: make_logprob(token, logprobs.logprob, logprobs.rank)}
    for rank, (token_id, logprob) in enumerate(zip(unpack_tokens(logprobs.top_ids), top_logprobs, strict=True), 1):
        if token_id != token:
            result[token_id] = make_logprob(token_id, logprob, rank)
    return result
