"""The workload of a trace: its arrival times, lengths and shared prefixes, with made content."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from radixkv.bench.session import Prompt, Request, Session, Turns
from radixkv.bench.workloads.blocks import Blocks
from radixkv.bench.workloads.datasets.mooncake import BLOCK_LEN, TraceRequest, read_trace
from radixkv.bench.workloads.parameters import Parameters
from radixkv.bench.workloads.problems import words
from radixkv.bench.workloads.questions import bad_lines, check_enough
from radixkv.bench.workloads.source import Made, Source
from radixkv.bench.workloads.synthetic_trace import made_trace
from radixkv.errors import ConfigError

WORDS = tuple(
    sorted(
        {
            *words.ANIMALS,
            *words.CLOTHES,
            *words.COLOURS,
            *words.CORNERS,
            *words.FOODS,
            *words.JOBS,
            *words.MATERIALS,
            *words.SHOPS,
            *words.THINGS,
        }
    )
)
"""Of the text form."""


class Trace(Parameters, frozen=True, kw_only=True, tag="trace"):
    """The requests of a trace, each at its own time, with prompts that share what those of the trace share.

    A block of a prompt becomes tokens that its hash id decides, so two prompts begin with the same tokens just
    as far as they begin with the same blocks. Only where two blocks' ids are equal modulo ``vocab_size -
    first_token``, their first token is the same too. The last block of a prompt, where it is a part, is the
    beginning of that block. Every request is a session of its own, since a trace does not tell conversations
    apart.

    In text form, a block becomes as many words as it has tokens. Prompts then share text as in the trace, but what
    the tokenizer makes of it decides the number of tokens, and where in a token the shared part ends.
    """

    num_prompts: int = 64
    """Requests that are taken; those left out for their length are among them."""
    start: int = 0
    """Requests of the trace before those."""
    form: Literal["tokens", "text"] = "tokens"
    block_len: int = BLOCK_LEN
    """Tokens that a block of 512 becomes. Fewer make all lengths smaller, by the same factor."""
    max_context: int | None = None
    """Most tokens of a prompt and its answer."""
    too_long: Literal["skip", "scale"] = "skip"
    """What happens where they are more: that request is left out, or blocks become shorter until all fit."""
    max_output_len: int | None = None
    """Longer answers end there."""
    first_token: int = 256
    """Prompts have no token ids below; many models have special tokens there."""
    vocab_size: int = 1024
    """Prompts have token ids below."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_len > BLOCK_LEN:
            raise ConfigError(f"block_len {self.block_len} must be at most {BLOCK_LEN}, the tokens of a block")
        if self.vocab_size < self.first_token + 2:
            raise ConfigError(f"vocab_size {self.vocab_size} must be above first_token {self.first_token} by 2")
        if self.too_long == "scale" and self.max_context is None:
            raise ConfigError('too_long = "scale" needs max_context, to which the requests are scaled')

    def make(self, source: Source) -> Made:
        """The requests from ``start`` on; prompts are made when they are sent. O(size of the trace).

        Without a data set, the trace is made from the seed, which else changes nothing.

        Raises:
            ConfigError: the trace cannot be read, is too short, or has no request that fits.
        """
        requests, counts = self._requests(source)
        taken = requests[self.start : self.start + self.num_prompts]
        lengths = _Lengths(self._fitting_block_len(taken), self.max_output_len)
        kept = [request for request in taken if self._fits(lengths.total(request))]
        if not kept:
            raise ConfigError(
                f"none of the {len(taken)} requests fits max_context {self.max_context}: the shortest has "
                f'{min(map(lengths.total, taken))} tokens; raise it, or set too_long = "scale"'
            )
        counts["too_long"] = len(taken) - len(kept)
        counts["scaled"] = len(kept) if lengths.block_len < BLOCK_LEN else 0
        counts["shortened_answers"] = sum(
            lengths.output(request) < lengths.scaled_output(request) for request in kept
        )
        prompt = self._prompt(lengths.block_len, max(max(request.hash_ids) for request in requests))

        def session(request: TraceRequest) -> Session:
            def turns() -> Turns:
                yield (Request(prompt(request.hash_ids, lengths.input(request)), lengths.output(request)),)

            return Session(turns, n_requests=1, arrival_s=(request.timestamp - taken[0].timestamp) / 1000)

        return Made([session(request) for request in kept], +counts)  # without zeros

    def _requests(self, source: Source) -> tuple[Sequence[TraceRequest], Counter[str]]:
        n_needed = self.start + self.num_prompts
        if source.dataset is None:
            return made_trace(source.seed, n_needed), Counter()
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

        # 0, for which nothing has room, if not even blocks of one token fit.
        return bisect_right(range(1, self.block_len + 1), self.max_context, key=longest)

    def _prompt(self, block_len: int, greatest_id: int) -> Callable[[Sequence[int], int], Prompt]:
        """What makes a prompt of the ids and the length."""
        # Python's own objects, so that prompts do not have a copy of each.
        alphabet = np.array(WORDS if self.form == "text" else range(self.first_token, self.vocab_size), object)
        n_digits = Blocks.digits(greatest_id, len(alphabet))
        if block_len < n_digits:
            raise ConfigError(
                f"blocks of {block_len} tokens cannot be told apart: hash ids up to {greatest_id} need {n_digits}; "
                "raise max_context or block_len"
            )
        blocks = Blocks(block_len, len(alphabet), n_digits)
        if self.form == "text":
            return lambda ids, length: " ".join(alphabet[blocks.symbols(ids, length)])
        return lambda ids, length: tuple(alphabet[blocks.symbols(ids, length)])


@dataclass(frozen=True)
class _Lengths:
    """The lengths of requests, in tokens, where a block has ``block_len``."""

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
        return -(-length * self.block_len // BLOCK_LEN)  # rounded up, so that the last block keeps a token
