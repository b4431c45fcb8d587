"""Drafts of answers that the fake device samples: right ones, wrong ones, and ones that go wrong."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.runtime.protocols.drafts import Drafts
from radixkv.runtime.request import Request
from radixkv.tree.node import TOKEN_BYTES
from support.fake_device import VOCAB_SIZE, chain, link, next_output_token, unpack
from support.fake_grammars import END, FakeGrammar

MAX_DRAFTS = 7


@dataclass
class FakeDrafts(Drafts):
    """Drafts tokens of the request's expected answer; a number that depends on its state says which are wrong.

    With a grammar most wrong ones are allowed, and drafts go on behind the end that it demands.
    """

    is_on: bool = False
    n_drafted: int = 0
    n_accepted: int = 0

    def wants_results(self, *, has_prompts: bool) -> bool:
        return self.is_on

    def draft(self, requests: Sequence[Request], max_drafts: Sequence[int], n_most: int) -> list[bytes]:
        found = []
        for request, max_of_row in zip(requests, max_drafts, strict=True):
            has_some = self.is_on and min(max_of_row, n_most) > 0
            found.append(self._draft(request, min(max_of_row, n_most)) if has_some else b"")
            n_most -= len(found[-1]) // TOKEN_BYTES
        return found

    def _draft(self, request: Request, max_drafts: int) -> bytes:
        tokens = unpack(bytes(request.known_key))
        end = chain(request.namespace, tokens)
        choice = abs(end) // 64
        n_drafts = min(max_drafts, choice % (MAX_DRAFTS + 1))
        first_wrong = choice // 8 % (2 * MAX_DRAFTS)
        sampling, output = request.sampling, tokens[request.n_prompt :]
        seed = sampling.seed if sampling.temperature else 0
        grammar = None if request.constraint is None else request.constraint.grammar
        for n in range(n_drafts):
            banned = sampling.banned if len(output) < request.min_tokens else ()
            if grammar is not None and END in output:
                grammar, banned = None, ()  # what is sampled behind the end, without a mask
            token = next_output_token(end, output, seed, banned, grammar)
            if n == first_wrong:
                token = _other_token(token, output, grammar if choice % 5 else None)
            output.append(token)
            end = link(end, token)
        return array("i", output[request.n_outputs :]).tobytes()

    def verified(self, request: Request, n_drafts: int, n_accepted: int) -> None:
        self.n_drafted += n_drafts
        self.n_accepted += n_accepted


def _other_token(token: int, output: Sequence[int], grammar: FakeGrammar | None) -> int:
    """Returns another token: one that the grammar allows if it can, and without one mostly one that it does not."""
    allowed = set() if grammar is None else grammar.allowed(output) - {token}
    return min(allowed, default=(token + 1) % VOCAB_SIZE)
