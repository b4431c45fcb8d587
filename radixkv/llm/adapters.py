"""Requests of ``LLM`` for adapters, as vLLM's users write them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.errors import InvalidRequest, ModelNotFound, shortened
from radixkv.generation.adapter_names import AdapterNames, LoadedAdapter
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
    base_model_name: str | None = None
    """No effect; vLLM's requests have one."""
    load_inplace: bool = False
    """Whether each call with this request loads the folder again, in place of the adapter of this name."""

    @property
    def name(self) -> str:
        """``lora_name``, as vLLM's requests have it."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """``lora_int_id``, as vLLM's requests have it."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """``lora_path``, as vLLM's requests have it."""
        return str(self.lora_path)


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
        self._names.set(LoadedAdapter(load, self._load(load, name, str(path))))
        if before is not None:
            self._unload(before.load)

    def unload(self, name: str) -> None:
        """Lets no request have an adapter any more, and frees it. Raises ``ModelNotFound`` if it is unknown."""
        self._unload(self._names.find(name).load)
        self._names.remove(name)

    def digests(self, lora_request: LoRARequests, prompts: Sequence[Any]) -> Sequence[str]:
        """Returns the digest of each prompt's adapter, empty for the model alone. Loads unknown ones.

        Raises:
            RequestError: an adapter is unknown and has no folder, has another one, or cannot be loaded. Then those
                that were loaded for this call are unloaded, unless they have replaced others.
        """
        given: Any = lora_request
        if isinstance(given, Sequence) and not isinstance(given, str):
            given = [_NONE if one is None else one for one in given]
        requests = broadcast("lora_request", LoRARequest, given, _NONE, prompts)
        before = {loaded.adapter.name for loaded in self._names}
        try:
            digests = {key: self._digest(one) for key, one in {id(one): one for one in requests}.items()}
        except BaseException:
            for name in [loaded.adapter.name for loaded in self._names if loaded.adapter.name not in before]:
                self.unload(name)
            raise
        return [digests[id(one)] for one in requests]

    def digest(self, lora_request: LoRARequest | None) -> str:
        """Returns the digest of an adapter, empty for the model alone, as ``digests`` does."""
        (digest,) = self.digests(lora_request, [None])
        return digest

    def _digest(self, request: LoRARequest) -> str:
        if request is _NONE:
            return ""
        loaded = self._names.get(request.lora_name)
        if request.load_inplace or (loaded is None and request.lora_path):
            self.load(request.lora_name, request.lora_path, in_place=request.load_inplace)
            loaded = self._names.get(request.lora_name)
        if loaded is None:
            raise ModelNotFound(
                f"lora_request asks for {shortened(request.lora_name)}, which is not loaded; give its lora_path "
                f"(loaded: {self._names})",
                param="lora_request",
            )
        adapter = loaded.adapter
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
