"""A request of ``LLM`` while it runs, which turns the loop's messages into a ``RequestOutput``."""

from __future__ import annotations

from radixkv.generation.logprobs import token_text, top_logprobs
from radixkv.generation.models import GenerationModel
from radixkv.generation.output import ChoiceStream, OutputDelta
from radixkv.llm.outputs import CompletionOutput, Logprob, RequestOutput
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.cache_use import CacheUse
from radixkv.wire.messages import (
    Done,
    KVEvictionUse,
    NewTokens,
    PromptLogprobs,
    Submit,
    TokenLogprobs,
    unpack_tokens,
)


class _OfflineChoice:
    """One of a request's ``n`` answers.

    An answer that is not streamed and has no stop strings is collected as raw tokens and detokenized at the end:
    building text and lists in every step would take several times as long.
    """

    def __init__(self, submit: Submit, model: GenerationModel, *, is_streamed: bool) -> None:
        sampling = submit.sampling
        self._is_deferred = not (is_streamed or sampling.stop)
        self._tokens = bytearray()
        self._token_logprobs: list[TokenLogprobs] = []
        self._has_logprobs = sampling.logprobs is not None
        self._stream = ChoiceStream(
            sampling, model, logprobs_by_token if self._has_logprobs else None, prompt=submit.tokens
        )
        self._output: OutputDelta[dict[int, Logprob]] = OutputDelta()
        """The answer so far, without the deferred tokens."""
        self._cumulative_logprob = 0.0 if self._has_logprobs else None

    def add(self, item: NewTokens) -> bool:
        """Adds new tokens. O(new tokens).

        Returns:
            Whether a stop string ended the answer; the loop does not see text and must be told.
        """
        tokens: bytes | bytearray = item.tokens
        token_logprobs = item.logprobs
        if self._is_deferred:
            self._tokens += item.tokens
            self._token_logprobs += item.logprobs or ()
            if item.finish_reason is None:
                return False
            tokens, token_logprobs = self._tokens, self._token_logprobs
        delta = self._stream.absorb(tokens, token_logprobs, item.finish_reason, item.stop_token_id)
        self._output.add(delta)
        if self._has_logprobs:
            new = [
                logprobs[token].logprob for token, logprobs in zip(delta.token_ids, delta.logprobs, strict=False)
            ]
            self._cumulative_logprob = sum(new, self._cumulative_logprob or 0.0)
        elif item.cumulative_logprob is not None:
            self._cumulative_logprob = item.cumulative_logprob
        return delta.finish_reason is not None and item.finish_reason is None

    def output(self, index: int) -> CompletionOutput:
        """Returns the answer so far."""
        return CompletionOutput(
            index=index,
            text=self._output.text,
            token_ids=list(self._output.token_ids),
            finish_reason=self._output.finish_reason,
            stop_reason=self._output.stop_reason,
            logprobs=list(self._output.logprobs) if self._has_logprobs else None,
            cumulative_logprob=self._cumulative_logprob,
        )


class OfflineRequest:
    """One request of ``LLM``: its prompt and its ``n`` answers.

    Args:
        prompt: the prompt's text; None if it was given as token ids.
        submit: the message that starts the request in the loop.
        model: ends answers and turns them into text.
        is_streamed: whether ``output`` is called before the end.
    """

    def __init__(
        self, prompt: str | None, submit: Submit, model: GenerationModel, *, is_streamed: bool = False
    ) -> None:
        self.submit = submit
        self.is_done = False
        self._prompt = prompt
        self._prompt_ids = unpack_tokens(submit.tokens)
        self._tokenizer = model.tokenizer
        sampling = submit.sampling
        self._choices = [_OfflineChoice(submit, model, is_streamed=is_streamed) for _ in range(sampling.n)]
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if sampling.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(self._prompt_ids)
        self._cache_use = CacheUse()
        self._kv_eviction: KVEvictionUse | None = None

    def add(self, item: NewTokens) -> bool:
        """Adds new tokens of one answer; returns whether a stop string ended it."""
        return self._choices[item.choice].add(item)

    def add_prompt_logprobs(self, item: PromptLogprobs) -> None:
        """Adds the logprobs of a range of prompt tokens."""
        assert self._prompt_logprobs is not None
        for position, logprobs in enumerate(item.items, item.start):
            self._prompt_logprobs[position] = logprobs_by_token(
                self._tokenizer, self._prompt_ids[position], 0, logprobs
            )

    def finish(self, done: Done) -> None:
        """Marks the request as done; all its answers have ended."""
        self.is_done = True
        self._cache_use = done.cache_use
        self._kv_eviction = done.kv_eviction

    def output(self) -> RequestOutput:
        """Returns the request's output so far; deferred answers are empty before their end. O(its size)."""
        return RequestOutput(
            request_id=self.submit.id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_ids,
            num_cached_tokens=self._cache_use.n_cached,
            outputs=[choice.output(index) for index, choice in enumerate(self._choices)],
            prompt_logprobs=self._prompt_logprobs,
            finished=self.is_done,
            num_loaded_tokens=self._cache_use.n_loaded,
            num_fetched_tokens=self._cache_use.n_fetched,
            kv_eviction=self._kv_eviction,
        )


def logprobs_by_token(
    tokenizer: Tokenizer | None,
    token: int,
    offset: int,
    token_logprobs: TokenLogprobs | None,
    n_top: int | None = None,
) -> dict[int, Logprob]:
    """Returns logprobs by token id: first the token's own, then those of the requested most likely tokens."""
    assert token_logprobs is not None
    own = Logprob(token_logprobs.logprob, token_logprobs.rank, token_text(tokenizer, token))
    likeliest = enumerate(top_logprobs(token_logprobs, n_top), start=1)
    return {token: own} | {
        other: Logprob(logprob, rank, token_text(tokenizer, other))
        for rank, (other, logprob) in likeliest
        if other != token
    }
