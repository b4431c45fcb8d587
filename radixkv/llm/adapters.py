"""Requests of ``LLM`` for adapters, as vLLM's users write them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.errors import InvalidRequest, ModelNotFound, shortened
from radixkv.generation.adapter_names import AdapterNames, Load
from radixkv.llm.prompts import broadcast
from radixkv.wire.adapter_messages import ServedAdapter


@dataclass(frozen=True)
class LoRARequest:
    """An adapter that answers prompts; one of an unknown name is loaded."""

    lora_name: str
    """By which ``LLM`` knows it."""
    lora_int_id: int = 0
    """No effect; vLLM's requests have one."""
    lora_path: str | Path = ""
    """Its folder; empty: whichever that is of an adapter that is loaded."""


_NONE = LoRARequest("")

LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One for all prompts, or one for each; None is the model alone."""


class Adapters:
    """Finds the adapters that requests ask for.

    Args:
        adapters: those of the start.
        load: loads one by the id of the load, a name and a folder. Raises ``RequestError``.
        unload: frees one by the id of its load.
    """

    def __init__(
        self,
        adapters: Iterable[ServedAdapter],
        load: Callable[[str, str, str], ServedAdapter],
        unload: Callable[[str], None],
    ) -> None:
        self._names = AdapterNames(adapters)
        self._load = load
        self._unload = unload

    def load(self, name: str, path: str | Path, *, in_place: bool) -> None:
        """Loads an adapter. Raises ``RequestError``, also for a name or path of another type."""
        before = self._names.check(name, in_place=in_place)
        if not isinstance(path, str | Path) or path == "":
            raise InvalidRequest(f"lora_path is {shortened(path)}; give the adapter's folder", param="lora_path")
        load = uuid.uuid4().hex
        self._names.give(Load(load, self._load(load, name, str(path))))
        if before is not None:
            self._unload(before.id)

    def unload(self, name: str) -> None:
        """Lets no request have an adapter any more, and frees it. Raises ``ModelNotFound`` if it is unknown."""
        self._unload(self._names.take(name).id)

    def digests(self, lora_request: LoRARequests, prompts: Sequence[Any]) -> Sequence[str]:
        """Returns the digest of each prompt's adapter, empty for the model alone. Loads unknown ones.

        Raises:
            RequestError: an adapter is unknown and has no folder, has another one, or cannot be loaded.
        """
        given: Any = lora_request
        if isinstance(given, Sequence) and not isinstance(given, str):
            given = [_NONE if one is None else one for one in given]
        return [self._digest(one) for one in broadcast("lora_request", LoRARequest, given, _NONE, prompts)]

    def digest(self, lora_request: LoRARequest | None) -> str:
        """Returns the digest of an adapter, empty for the model alone, as ``digests`` does."""
        (digest,) = self.digests(lora_request, [None])
        return digest

    def _digest(self, request: LoRARequest) -> str:
        if request is _NONE:
            return ""
        load = self._names.get(request.lora_name)
        if load is None and request.lora_path:
            self.load(request.lora_name, request.lora_path, in_place=False)
            load = self._names.get(request.lora_name)
        if load is None:
            raise ModelNotFound(
                f"lora_request asks for {shortened(request.lora_name)}, which is not loaded; give its lora_path "
                f"(loaded: {self._names})",
                param="lora_request",
            )
        adapter = load.adapter
        if request.lora_path and not _is_same_folder(request.lora_path, adapter.path):
            raise InvalidRequest(
                f"lora_request asks for {shortened(request.lora_name)} in {shortened(request.lora_path)}, and "
                f"LLM has it from {shortened(adapter.path)}; give that folder, or none, or replace the adapter by "
                "load_lora_adapter with load_inplace",
                param="lora_request",
            )
        return adapter.digest


def _is_same_folder(one: str | Path, other: str | Path) -> bool:
    try:
        return os.path.realpath(one) == os.path.realpath(other)
    except (OSError, ValueError):  # a character that no path has
        return False
