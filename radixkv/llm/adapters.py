"""Requests of ``LLM`` for adapters, as vLLM's users write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.errors import InvalidRequest, shortened
from radixkv.llm.prompts import broadcast
from radixkv.wire.messages import ServedAdapter


@dataclass(frozen=True)
class LoRARequest:
    """An adapter that answers prompts: one of the ``lora_modules`` of ``LLM``."""

    lora_name: str
    """Its name there."""
    lora_int_id: int = 0
    """No effect; vLLM's requests have one."""
    lora_path: str = ""
    """Its folder there; empty: whichever that is."""


_NONE = LoRARequest("")

LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One for all prompts, or one for each; None is the model alone."""


class Adapters:
    """Finds the adapters that requests ask for.

    Args:
        adapters: those that are loaded.
    """

    def __init__(self, adapters: Sequence[ServedAdapter]) -> None:
        self._adapters = {adapter.name: adapter for adapter in adapters}

    def digests(self, lora_request: LoRARequests, prompts: Sequence[Any]) -> Sequence[str]:
        """Returns the digest of each prompt's adapter, empty for the model alone. Raises ``InvalidRequest``."""
        given: Any = lora_request
        if isinstance(given, Sequence) and not isinstance(given, str):
            given = [_NONE if one is None else one for one in given]
        return [self._digest(one) for one in broadcast("lora_request", LoRARequest, given, _NONE, prompts)]

    def digest(self, lora_request: LoRARequest | None) -> str:
        """Returns the digest of an adapter, empty for the model alone. Raises ``InvalidRequest``."""
        (digest,) = self.digests(lora_request, [None])
        return digest

    def _digest(self, request: LoRARequest) -> str:
        if request is _NONE:
            return ""
        adapter = self._adapters.get(request.lora_name)
        if adapter is None:
            loaded = ", ".join(map(shortened, self._adapters)) or "none"
            raise InvalidRequest(
                f"lora_request asks for {shortened(request.lora_name)}, which is not loaded; give it in "
                f"lora_modules of LLM (loaded: {loaded})",
                param="lora_request",
            )
        if request.lora_path and Path(request.lora_path) != Path(adapter.path):
            raise InvalidRequest(
                f"lora_request asks for {shortened(request.lora_name)} in {shortened(request.lora_path)}, and "
                f"LLM has it from {shortened(adapter.path)}; give that folder, or none",
                param="lora_request",
            )
        return adapter.digest
