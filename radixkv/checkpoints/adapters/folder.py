"""A PEFT adapter's folder, read once, so that its digest and its tensors are of the same bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from radixkv.checkpoints.adapters.config import CONFIG_NAME, PeftConfig
from radixkv.checkpoints.adapters.header import Span, read_spans
from radixkv.checkpoints.adapters.pairs import LoraShape, Pair, find_pairs, shapes_of
from radixkv.errors import CheckpointError

_WEIGHTS_NAME = "adapter_model.safetensors"
FILE_NAMES = (CONFIG_NAME, _WEIGHTS_NAME)
"""All files of a folder that are read."""
_DIGEST_KIND = "radixkv LoRA 1"
"""Changes when the same files shall have another digest."""
_WRAPPERS = (
    "model.language_model.model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "backbone.",
    "model.",
    "",
)
"""What precedes a text model's own names, such as ``layers.0``, in models that contain it; longer ones first."""


class StoredMatrix(NamedTuple):
    """A matrix as it is stored."""

    dtype: str
    """As safetensors names it: F32, F16 or BF16."""
    shape: tuple[int, ...]
    content: memoryview
    """Its bytes, row by row, little-endian. Writable, but must not be changed."""


@dataclass(frozen=True)
class AdapterFolder:
    """A LoRA adapter that PEFT saved, in memory. Open it with ``AdapterFolder.open``."""

    path: Path
    """The folder."""
    digest: str
    """A hex digest of all that outputs depend on, which are neither the folder's name nor times of files."""
    invocation_tokens: tuple[int, ...] | None
    """Tokens from whose last occurrence in a prompt on the adapter is active (aLoRA); None: it always is."""
    base_model: str | None
    """Name of the model that it was trained with, if the folder says it."""
    modules: Mapping[str, LoraShape]
    """The adapted modules, such as ``model.layers.0.self_attn.q_proj``."""
    _config: PeftConfig = field(repr=False)
    _pairs: Mapping[str, Pair] = field(repr=False)
    _data: memoryview = field(repr=False)

    @classmethod
    def open(cls, path: Path, *, max_rank: int) -> AdapterFolder:
        """Reads a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

        Modules have the names that they have in the model that the adapter was trained with, see ``for_base``.
        Values of tensors are not checked.

        Args:
            path: the folder.
            max_rank: the highest rank to serve.

        Raises:
            CheckpointError: a file is missing or damaged, or the adapter cannot be served. Names the folder's file,
                the field or tensor, its value, and what to do.

        Cost: the file's bytes in memory, read and digested once: 0.4 s for 84 MB. Headers are checked first.
        """
        config = PeftConfig.read(path)
        file_path = path / _WEIGHTS_NAME
        _check_file(file_path)
        try:
            with file_path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                header, spans = read_spans(file, size, file_path)
                pairs = find_pairs(spans, file_path)
                modules = shapes_of(pairs, config, max_rank=max_rank)
                # Not a bytearray: no thread of Python runs while its zeros are written, which takes tens of
                # milliseconds for 84 MB.
                data = np.empty(size - len(header), np.uint8).data
                n_read = file.readinto(data)
        except OSError as error:
            raise CheckpointError(f"{file_path} cannot be read: {error}; fetch the adapter again") from error
        except MemoryError as error:
            raise CheckpointError(
                f"{file_path} has {size} bytes, for which there is no memory; check that it is an adapter of this "
                "model"
            ) from error
        if n_read != len(data):
            raise CheckpointError(f"{file_path} was truncated while it was read; load the adapter again")
        outputs = [
            _DIGEST_KIND,
            config.invocation_tokens,
            sorted((name, shape.scale) for name, shape in modules.items()),
        ]
        digest = sha256(json.dumps(outputs).encode())
        digest.update(sha256(header).digest())
        digest.update(data)
        return cls(
            path,
            digest.hexdigest(),
            config.invocation_tokens,
            config.base_model,
            modules,
            config,
            pairs,
            data,
        )

    @property
    def n_bytes(self) -> int:
        """Memory of the matrices."""
        return len(self._data)

    def stored(self, module: str) -> tuple[StoredMatrix, StoredMatrix]:
        """Returns A [rank, in] and B [out, rank] of a module as they are stored, without a copy."""
        pair = self._pairs[module]
        return self._matrix(pair.a), self._matrix(pair.b)

    def _matrix(self, span: Span) -> StoredMatrix:
        return StoredMatrix(span.dtype, span.shape, self._data[span.begin : span.end])

    def for_base(self, layers: str, shapes: Mapping[str, tuple[int, ...]]) -> AdapterFolder:
        """Returns the adapter with the names that a base model has for its modules, after checking that it fits.

        Adapters of a text model, of a model that contains it, and of a text model without a head have other names
        for the same modules: ``model.layers``, ``model.language_model.layers`` or ``layers``.

        Args:
            layers: beginning of the names of the base's tensors of layers, such as ``model.layers.``; the layer's
                index follows it.
            shapes: [out, in] of the base's modules that may be adapted.

        Raises:
            CheckpointError: the base has no such module or in another shape, or the adapter lacks a module of the
                base that its configuration names.
        """
        base, relative = _split(layers)
        found = {_split(name)[0] for name in self.modules if _split(name)[1].startswith(relative)}
        if len(found) > 1:
            raise self._unfit(f"its modules have the names of several models, {', '.join(sorted(found))}…")
        trained = found.pop() if found else base
        new_names = {
            name: f"{base}{_split(name)[1]}" if _split(name)[1].startswith(relative) else name
            for name in self.modules
        }
        for name, shape in self.modules.items():
            expected = shapes.get(new_names[name])
            if expected is None:
                raise self._unfit(f"it adapts {name}, which cannot be adapted in this model or is not in it")
            if expected != (shape.n_out, shape.n_in):
                raise self._unfit(
                    f"its {name} has {shape.n_in} inputs and {shape.n_out} outputs, but {new_names[name]} of the "
                    f"model has {expected[1]} and {expected[0]}"
                )
        adapted = set(new_names.values())
        others = {f"{trained}{name.removeprefix(base)}": name for name in shapes if name not in adapted}
        targets = self._config.targets.select(others)
        for trained_name, name in others.items():
            if trained_name in targets:
                raise self._unfit(f"its {self._config.path.name} names {name}, of which it has no tensors")
        return replace(
            self,
            modules=MappingProxyType({new_names[name]: shape for name, shape in self.modules.items()}),
            _pairs=MappingProxyType({new_names[name]: pair for name, pair in self._pairs.items()}),
        )

    def _unfit(self, reason: str) -> CheckpointError:
        trained = "" if self.base_model is None else f" {self.base_model!r}"
        return CheckpointError(
            f"the adapter in {self.path} does not fit the served model: {reason}; serve it with the model that it "
            f"was trained with{trained}"
        )


def _split(name: str) -> tuple[str, str]:
    """Returns what precedes the text model's own name of a module, and that name."""
    wrapper = next(wrapper for wrapper in _WRAPPERS if name.startswith(wrapper))
    return wrapper, name.removeprefix(wrapper)


def _check_file(path: Path) -> None:
    """Raises ``CheckpointError`` if the folder has no file of tensors, or they are in another format."""
    if path.is_file():
        return
    if path.exists():  # reading a pipe may never end
        raise CheckpointError(f"{path} is not a regular file; fetch the adapter again")
    if (pickled := path.with_suffix(".bin")).exists():
        raise CheckpointError(
            f"{pickled.parent} has {pickled.name}, a pickle, which is never read; load it with PEFT and save it as "
            f"{path.name} with save_pretrained(folder, safe_serialization=True)"
        )
    if parts := sorted(one.name for one in path.parent.glob("adapter_model*.safetensors*")):
        raise CheckpointError(
            f"{path.parent} has {parts[0]}, but no {path.name}; adapters in several files are not read: save all "
            "tensors in one file"
        )
    raise CheckpointError(f"{path.parent} has no {path.name}; fetch the adapter again")
