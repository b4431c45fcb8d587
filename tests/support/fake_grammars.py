"""Fake grammars: what may come next is a function of the output, and compiling ends when the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import GrammarFailure, InvalidRequest
from radixkv.wire.messages import pack_tokens, unpack_tokens
from radixkv.wire.structured_outputs import StructuredOutputs

END = 977
"""The token that ends the output of every fake grammar; one of ``support.actions.STOP``."""


@dataclass(frozen=True)
class FakeGrammar:
    """Outputs whose every token depends, modulo a number, on the sum of all before."""

    modulus: int = 3
    length: int = 4
    """Tokens before the end token must come; one less is allowed."""
    n_accepted: int | None = None
    """Matchers reject the token after so many, although the mask allows it; None: they reject none."""

    @property
    def specification(self) -> StructuredOutputs:
        """What ``FakeCompiler`` makes this grammar of."""
        n_accepted = -1 if self.n_accepted is None else self.n_accepted
        return StructuredOutputs(regex=f"{self.modulus} {self.length} {n_accepted}")

    def allowed(self, output: Sequence[int]) -> set[int]:
        """Returns the tokens that may come after an output."""
        if len(output) >= self.length:
            return {END}
        tokens = {token for token in range(100, 1000) if token % self.modulus == sum(output) % self.modulus}
        return tokens - {END} if len(output) < self.length - 1 else tokens | {END}

    def new_matcher(self) -> FakeMatcher:
        return FakeMatcher(self)


@dataclass
class FakeMatcher:
    grammar: FakeGrammar
    output: list[int] = field(default_factory=list)

    def accept(self, token: int) -> bool:
        assert not self.has_ended, "a token after the end"
        if token not in self.grammar.allowed(self.output) or len(self.output) == self.grammar.n_accepted:
            return False
        self.output.append(token)
        return True

    def forced(self, n_tokens: int) -> bytes:
        output = list(self.output)
        while len(output) < self.n_tokens + n_tokens and len(allowed := self.grammar.allowed(output)) == 1:
            if allowed == {END}:
                break
            output += allowed
        return pack_tokens(output[self.n_tokens :])

    def n_allowed(self, tokens: bytes) -> int:
        following = FakeMatcher(self.grammar, list(self.output))
        return sum(
            1 for _ in takewhile(lambda token: token != END and following.accept(token), unpack_tokens(tokens))
        )

    def truncate(self, n_tokens: int) -> None:
        assert n_tokens <= self.n_tokens, "tokens are taken back that never came"
        del self.output[n_tokens:]

    def rejection(self, token: int) -> GrammarFailure:
        return GrammarFailure(f"the grammar has no {token} here")

    @property
    def has_ended(self) -> bool:
        return self.output[-1:] == [END]

    @property
    def n_tokens(self) -> int:
        return len(self.output)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return (END,)


@dataclass
class FakeCompiler:
    """Compiles at once, or when ``finish`` is called."""

    is_immediate: bool = True
    pending: dict[int, StructuredOutputs] = field(default_factory=dict)
    compiled: list[tuple[int, FakeGrammar | InvalidRequest]] = field(default_factory=list)
    n_requests: int = 0
    n_closed: int = 0

    def get(self, specification: StructuredOutputs, tenant: str) -> None:
        return None

    def request(self, specification: StructuredOutputs, tenant: str) -> int:
        ticket, self.n_requests = self.n_requests, self.n_requests + 1
        self.pending[ticket] = specification
        if self.is_immediate:
            self.finish(0)
        return ticket

    def finish(self, which: int, *, refuses: bool = False) -> None:
        """Finishes one of the pending requests, if there are any."""
        if self.pending:
            ticket = list(self.pending)[which % len(self.pending)]
            modulus, length, n_accepted = map(int, (self.pending.pop(ticket).regex or "").split())
            refusal = InvalidRequest("the grammar is refused", param="structured_outputs")
            grammar = FakeGrammar(modulus, length, None if n_accepted < 0 else n_accepted)
            self.compiled.append((ticket, refusal if refuses else grammar))

    def take_compiled(self) -> list[tuple[int, FakeGrammar | InvalidRequest]]:
        compiled, self.compiled = self.compiled, []
        return compiled

    def cancel(self, ticket: int) -> None:
        self.pending.pop(ticket, None)
        self.compiled = [one for one in self.compiled if one[0] != ticket]

    def fileno(self) -> int:
        raise AssertionError("no fake loop waits on a descriptor")

    def fill_masks(self, matchers: Sequence[FakeMatcher], bits: NDArray[np.int32]) -> None:
        for matcher, row in zip(matchers, bits, strict=True):
            assert not matcher.has_ended, "a mask after the end"
            flags = np.zeros(32 * len(row), dtype=np.uint8)
            flags[sorted(matcher.grammar.allowed(matcher.output))] = 1
            row[:] = np.packbits(flags, bitorder="little").view(np.int32)

    def close(self) -> None:
        self.n_closed += 1
