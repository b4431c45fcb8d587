"""Workload with the arrival times, lengths and shared prefixes of a trace."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from radixkv.errors import ConfigError
from radixkv.lab.bench.session import BenchRequest, Prompt, Session, Turns
from radixkv.lab.bench.workloads.base import Parameters, Source, WorkloadSessions, bad_lines, check_enough
from radixkv.lab.bench.workloads.mooncake import BLOCK_LEN, TraceRequest, generate_trace, read_trace
from radixkv.lab.bench.workloads.templates import WORDS

_LISTS = ("animals", "clothes", "colours", "corners", "foods", "jobs", "materials", "shops", "things")
VOCABULARY = sorted({word for name in _LISTS for word in WORDS[name]})
"""Words of the text form."""


class Trace(Parameters, frozen=True, kw_only=True, tag="trace"):
    """The requests of a trace at their arrival times, with prompts that share the same prefixes as in the trace.

    A block becomes tokens that depend on its hash id alone, so two prompts share exactly the tokens of the leading
    blocks that they share. One exception: different blocks whose ids are equal modulo ``vocab_size - first_token``
    have the same first token. A last block that is not full becomes the beginning of its block. Every request is a
    session of its own, since a trace does not have conversations.

    In text form, a block becomes as many words as it has tokens. Prompts then share text as in the trace, but the
    tokenizer determines the number of tokens and where the shared tokens end.
    """

    num_prompts: int = 64
    """Requests taken from the trace, including those that are left out as too long."""
    start: int = 0
    """Requests at the beginning of the trace that are skipped."""
    form: Literal["tokens", "text"] = "tokens"
    block_len: int = BLOCK_LEN
    """Tokens that a block of 512 becomes. A smaller value makes all lengths smaller by the same factor."""
    max_context: int | None = None
    """Maximum tokens of a prompt and its answer together. None: no limit."""
    too_long: Literal["skip", "scale"] = "skip"
    """Whether requests above ``max_context`` are left out, or blocks are made shorter until all requests fit."""
    max_output_len: int | None = None
    """Maximum tokens of an answer; longer ones are shortened. None: no limit."""
    first_token: int = 256
    """Lowest token id in prompts; many models have special tokens below."""
    vocab_size: int = 1024
    """Token ids in prompts are below this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_len > BLOCK_LEN:
            raise ConfigError(f"block_len {self.block_len} must be at most {BLOCK_LEN}, the tokens of a block")
        if self.vocab_size < self.first_token + 2:
            raise ConfigError(f"vocab_size {self.vocab_size} must be above first_token {self.first_token} by 2")
        if self.too_long == "scale" and self.max_context is None:
            raise ConfigError('too_long = "scale" needs max_context, to which the requests are scaled')

    def make(self, source: Source) -> WorkloadSessions:
        """Returns one session for each request from ``start`` on. O(size of the trace).

        Prompts are generated when they are sent. The seed has an effect only without a data set, when the trace is
        generated from it.

        Raises:
            ConfigError: the trace cannot be read, is too short, or has no request that fits.
        """
        requests, counts = self._requests(source)
        taken = requests[self.start : self.start + self.num_prompts]
        lengths = _Lengths(self._fitting_block_len(taken), self.max_output_len)
        fitting = [request for request in taken if self._fits(lengths.total(request))]
        if not fitting:
            raise ConfigError(
                f"none of the {len(taken)} requests fits max_context {self.max_context}: the shortest has "
                f'{min(map(lengths.total, taken))} tokens; raise it, or set too_long = "scale"'
            )
        counts["too_long"] = len(taken) - len(fitting)
        counts["scaled"] = len(fitting) if lengths.block_len < BLOCK_LEN else 0
        counts["shortened_answers"] = sum(
            lengths.output(request) < lengths.scaled_output(request) for request in fitting
        )
        prompt = self._prompt(lengths.block_len, max(max(request.hash_ids) for request in requests))

        def session(request: TraceRequest) -> Session:
            def turns() -> Turns:
                yield (BenchRequest(prompt(request.hash_ids, lengths.input(request)), lengths.output(request)),)

            return Session(turns, n_requests=1, arrival_s=(request.timestamp - taken[0].timestamp) / 1000)

        return WorkloadSessions([session(request) for request in fitting], +counts)  # without zeros

    def _requests(self, source: Source) -> tuple[Sequence[TraceRequest], Counter[str]]:
        n_needed = self.start + self.num_prompts
        if source.dataset is None:
            return generate_trace(source.seed, n_needed), Counter()
        read = read_trace(source.dataset, skip_bad_lines=source.skip_bad_lines)
        check_enough(source, "requests", len(read.items), n_needed, settings="start or num_prompts")
        return read.items, Counter(bad_lines(read.n_bad_lines))

    def _fits(self, n_tokens: int) -> bool:
        return self.max_context is None or n_tokens <= self.max_context

    def _fitting_block_len(self, requests: Sequence[TraceRequest]) -> int:
        if self.too_long == "skip" or self.max_context is None:
            return self.block_len

        def longest(block_len: int) -> int:
            return max(map(_Lengths(block_len, self.max_output_len).total, requests))

        # The result is 0, with which no request fits, if blocks of one token are too long.
        return bisect_right(range(1, self.block_len + 1), self.max_context, key=longest)

    def _prompt(self, block_len: int, max_id: int) -> Callable[[Sequence[int], int], Prompt]:
        """Returns a function from hash ids and a length to a prompt."""
        # An array of Python objects, so that prompts refer to them instead of creating one for each token.
        alphabet = np.array(VOCABULARY if self.form == "text" else range(self.first_token, self.vocab_size), object)
        n_digits = Blocks.digits(max_id, len(alphabet))
        if block_len < n_digits:
            raise ConfigError(
                f"blocks of {block_len} tokens cannot be told apart: hash ids up to {max_id} need {n_digits}; "
                "raise max_context or block_len"
            )
        blocks = Blocks(block_len, len(alphabet), n_digits)
        if self.form == "text":
            return lambda ids, length: " ".join(alphabet[blocks.symbols(ids, length)])
        return lambda ids, length: tuple(alphabet[blocks.symbols(ids, length)])


@dataclass(frozen=True)
class _Lengths:
    """Computes the lengths of requests in tokens when a block has ``block_len`` tokens."""

    block_len: int
    max_output_len: int | None

    def input(self, request: TraceRequest) -> int:
        return self._scaled(request.input_length)

    def output(self, request: TraceRequest) -> int:
        scaled = self.scaled_output(request)
        return scaled if self.max_output_len is None else min(scaled, self.max_output_len)

    def scaled_output(self, request: TraceRequest) -> int:
        return self._scaled(request.output_length)

    def total(self, request: TraceRequest) -> int:
        return self.input(request) + self.output(request)

    def _scaled(self, length: int) -> int:
        return -(-length * self.block_len // BLOCK_LEN)  # rounded up, so that the last block has a token


@dataclass(frozen=True)
class Blocks:
    """Generates the content of blocks as symbols below ``n_symbols``; each symbol becomes a token or a word.

    A block begins with the digits of its id to the base ``n_symbols``, last digit first, followed by pseudo-random
    symbols. So different blocks always differ. Blocks whose ids differ modulo ``n_symbols`` differ from the first
    symbol on; others have at most ``n_digits - 1`` leading symbols in common.
    """

    block_len: int
    """Symbols in a block; at least ``n_digits``, or blocks cannot be told apart."""
    n_symbols: int
    n_digits: int
    """Digits of every id to the base ``n_symbols``."""

    @staticmethod
    def digits(max_id: int, n_symbols: int) -> int:
        """Returns the number of digits of ids up to ``max_id`` to the base ``n_symbols``."""
        count = 1
        while n_symbols**count <= max_id:
            count += 1
        return count

    def symbols(self, ids: Sequence[int], length: int) -> npt.NDArray[np.int64]:
        """Returns the first ``length`` symbols of the concatenated blocks: int64 ``[length]``.

        Cost: about 30 ns a symbol.
        """
        block_ids = np.asarray(ids, np.uint64)
        symbols = _mix(_mix(block_ids)[:, None] + np.arange(self.block_len).astype(np.uint64))
        symbols = (symbols >> np.uint64(32)) * np.uint64(self.n_symbols) >> np.uint64(32)
        for digit in range(self.n_digits):
            symbols[:, digit] = block_ids // np.uint64(self.n_symbols**digit) % np.uint64(self.n_symbols)
        return symbols.reshape(-1)[:length].astype(np.int64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns SplitMix64 of each value, a hash that depends on all its bits."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
