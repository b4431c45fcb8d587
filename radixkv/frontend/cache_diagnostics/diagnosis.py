"""The diagnosis of one request, and the counts of all."""

from __future__ import annotations

from collections import Counter

from radixkv.frontend.cache_diagnostics.comparison import INVOCATION, MESSAGES, Verdict, compare
from radixkv.frontend.cache_diagnostics.fingerprint import Fingerprint
from radixkv.frontend.cache_diagnostics.kept_fingerprints import KeptFingerprints

PARTS = (
    "model",
    "prompt_cache_key",
    "service_tier",
    "system",
    "tools",
    "text_format",
    "reasoning_effort",
    "verbosity",
    "settings",
    MESSAGES,
    INVOCATION,
)
"""The parts of requests that the APIs compare, by the names under which changes are counted; ``invocation`` where
none did, but an activated LoRA acts from elsewhere on."""


class CacheDiagnostics:
    """Compares requests with earlier ones of the same client.

    Args:
        state_block_tokens: the distance of states, from which alone a match goes on; 0 if it needs none.
        kept: the requests that later ones are compared with.
    """

    def __init__(self, state_block_tokens: int = 0, kept: KeptFingerprints | None = None) -> None:
        self.counts = Counter(dict.fromkeys(("same", "not_found", "unavailable", *PARTS), 0))
        """Comparisons so far, by their outcome, or by the part that changed."""
        self.state_block_tokens = state_block_tokens
        self._kept = kept or KeptFingerprints()

    def open(self, tenant: str, response_id: str, fingerprint: Fingerprint, compared_id: str | None) -> Diagnosis:
        """Returns the diagnosis of a request that is about to run. O(1).

        Args:
            tenant: who has sent it.
            response_id: the id that its response will have.
            fingerprint: of the request.
            compared_id: the id of the response to whose request it is compared; None: it is only kept.
        """
        return Diagnosis(self, self._kept, tenant, response_id, fingerprint, compared_id)


class Diagnosis:
    """What is told of one request. ``CacheDiagnostics.open`` makes it.

    Args:
        diagnostics: counts it.
        kept: gets the request.
        tenant: who has sent it.
        response_id: the id of its response.
        fingerprint: of the request.
        compared_id: see ``CacheDiagnostics.open``.
    """

    def __init__(
        self,
        diagnostics: CacheDiagnostics,
        kept: KeptFingerprints,
        tenant: str,
        response_id: str,
        fingerprint: Fingerprint,
        compared_id: str | None,
    ) -> None:
        self.is_asked = compared_id is not None
        """Whether the client has named an earlier request."""
        self._diagnostics = diagnostics
        self._kept = kept
        self._tenant = tenant
        self._response_id = response_id
        self._fingerprint = fingerprint
        self._earlier = None if compared_id is None else kept.find(tenant, compared_id)

    def conclude(self, n_cached: int) -> Verdict | None:
        """Keeps the request for later ones, and returns what is told of it; None if nothing was asked.

        Call it once. O(pages).

        Args:
            n_cached: tokens of its prompt that were not computed.
        """
        self._kept.keep(self._tenant, self._response_id, self._fingerprint)
        if not self.is_asked:
            return None
        if self._earlier is None:
            verdict = Verdict("not_found")
        else:
            verdict = compare(self._earlier, self._fingerprint, n_cached, self._diagnostics.state_block_tokens)
        self._diagnostics.counts[verdict.part or verdict.outcome] += 1
        return verdict
