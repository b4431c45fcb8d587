"""Sources of a decoder's tensors: safetensors files or a random generator."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from radixkv.checkpoints.files import read_object
from radixkv.errors import CheckpointError

FLOATS = ("F32", "F16", "BF16")
"""Names that safetensors has for floats of 16 and 32 bits."""


class Header(NamedTuple):
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    """The dtypes that it may have, as safetensors names them."""
    may_be_scalar: bool = False
    """Whether it may also have no dimension."""


class TensorSource(Protocol):
    """Provides tensors by name."""

    def fill(self, name: str, out: Tensor) -> None:
        """Copies the tensor into ``out``.

        Args:
            name: of the tensor.
            out: as many elements in the same order. Shape, dtype and strides may differ; if it is not contiguous,
                its first dimension is that of the tensor.

        Raises:
            CheckpointError: the tensor cannot be read.
        """
        ...

    def compute(self, names: Sequence[str], use: Callable[[Sequence[Tensor]], None]) -> None:
        """Reads tensors as they are stored, and calls ``use`` with them on the device, perhaps in another thread.

        Calls do not run at the same time.

        Raises:
            CheckpointError: a tensor cannot be read.
        """
        ...


class TensorViews(Protocol):
    """Provides tensors as they are stored."""

    def view(self, name: str) -> Tensor:
        """Returns the tensor as stored in its file. Thread-safe. Raises ``CheckpointError``."""
        ...


class RandomTensors:
    """Synthetic weights: norms are 1, biases are 0, matrices are random and preserve the magnitude of their input.

    The same names in the same order on the same kind of device give the same values.

    Args:
        shapes: of all tensors, by name.
        dtype: of tensors that ``compute`` and ``view`` return.
        device: where they are generated.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = shapes
        self._dtype = dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def fill(self, name: str, out: Tensor) -> None:
        """See ``TensorSource.fill``; ``out`` must be on the generator's device."""
        if name.endswith((".bias", "_bias")):
            out.zero_()
        elif out.ndim == 1:
            out.fill_(1.0)
        else:
            # Matrices are [out, in]; those of all experts in one tensor are [experts, in, out].
            bound = math.sqrt(3 / out.shape[1])
            out.uniform_(-bound, bound, generator=self._generator)

    def compute(self, names: Sequence[str], use: Callable[[Sequence[Tensor]], None]) -> None:
        """See ``TensorSource.compute``."""
        use([self.view(name) for name in names])

    def view(self, name: str) -> Tensor:
        """Returns a new tensor, in one thread only."""
        tensor = torch.empty(self._shapes[name], dtype=self._dtype, device=self._generator.device)
        self.fill(name, tensor)
        return tensor


class SafetensorsFiles:
    """The safetensors files of a folder, kept open until ``stack`` closes.

    Raises:
        CheckpointError: a file or the index is missing or corrupt, or two files contain the same tensor.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stored: dict[str, _StoredTensor] = {}
        for path in _paths(folder):
            if not path.is_file():  # opening a pipe may never end
                raise CheckpointError(f"{path} is not a regular file; fetch the checkpoint again")
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
                tensors = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is not a complete safetensors file: {error}; fetch it again"
                ) from error
            for name in tensors:
                if name in self._stored:
                    raise CheckpointError(
                        f"{folder}: tensor {name} is in {self._stored[name].path.name} and in {path.name}; "
                        "fetch the checkpoint again"
                    )
                self._stored[name] = _StoredTensor(name, path, file)

    def add_missing_prefix(self, layers: str, head: str) -> None:
        """Renames tensors as those of the whole model, if the files have the names of its base model.

        Transformers saves a base model, such as ``OPTModel``, with names like ``decoder.layers.0.fc1.weight``
        instead of ``model.decoder.layers.0.fc1.weight``, and reads both.

        Args:
            layers: beginning of the names of all layers' tensors in the whole model.
            head: beginning of the names of the output head's tensors, which have no prefix.
        """
        first, _, rest = layers.partition(".")
        if any(name.startswith(layers) for name in self._stored):
            return
        if any(name.startswith(rest) for name in self._stored):
            self._stored = {
                name if name.startswith(head) else f"{first}.{name}": stored
                for name, stored in self._stored.items()
            }

    def rename(self, name: str, new: str) -> None:
        """Gives a tensor another name, which no other one has. Errors have the name of the file."""
        self._stored[new] = self._stored.pop(name)

    def split(self, name: str, shape: tuple[int, ...], parts: Mapping[str, tuple[int | slice, ...]]) -> None:
        """Gives parts of a tensor names of their own, in place of that of the whole.

        Args:
            name: of the tensor.
            shape: expected shape of the whole.
            parts: where each part is, by its name.

        Raises:
            CheckpointError: the tensor has another shape.
        """
        stored = self._stored.pop(name)
        stored.check_shape(shape)
        self._stored |= {part: stored._replace(where=where) for part, where in parts.items()}

    def check_layers(self, prefix: str, n_layers: int) -> None:
        """Checks the number of layers that tensor names mention. Reads no tensor.

        Args:
            prefix: beginning of the names of all layers' tensors; the layer's index follows it.
            n_layers: expected number of layers.

        Raises:
            CheckpointError: the number differs.
        """
        names = (name for name in self._stored if name.startswith(prefix))
        n_layers_in_files = len({name.removeprefix(prefix).partition(".")[0] for name in names})
        if n_layers_in_files == 0:
            raise CheckpointError(f"{self._folder} has no tensors named {prefix}…, as this architecture's are")
        if n_layers_in_files != n_layers:
            raise CheckpointError(
                f"{self._folder / 'config.json'}: num_hidden_layers is {n_layers}, but the safetensors files have "
                f"{n_layers_in_files} layers; fetch the checkpoint again"
            )

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._stored)

    def check(self, headers: Mapping[str, Header], optional: frozenset[str]) -> None:
        """Checks names, shapes and dtypes of all tensors. Reads headers only.

        Args:
            headers: expected headers by full name.
            optional: names of further tensors that may be present.

        Raises:
            CheckpointError: a tensor is missing, unexpected, or of a wrong shape or dtype.
        """
        present = self._stored.keys()
        if missing := sorted(headers.keys() - present):
            advice = "; one without a head makes embeddings: --task embed" if missing == ["lm_head.weight"] else ""
            raise CheckpointError(
                f"{self._folder} lacks {_abbreviated(missing)}; fetch the checkpoint again{advice}"
            )
        if extra := sorted(self._stored[name].name for name in present - headers.keys() - optional):
            raise CheckpointError(
                f"{self._folder} has tensors that its config.json does not call for: {_abbreviated(extra)}"
            )
        for name, (shape, dtypes, may_be_scalar) in headers.items():
            stored = self._stored[name]
            if not stored.where:
                stored.check_shape(shape, may_be_scalar=may_be_scalar)
            if (dtype := stored.file.get_slice(stored.name).get_dtype()) not in dtypes:
                raise CheckpointError(
                    f"{stored.name} in {stored.path} has dtype {dtype}; this release reads {', '.join(dtypes)}"
                )

    def fill(self, name: str, out: Tensor) -> None:
        """See ``TensorSource.fill``; ``check`` must have passed."""
        out.copy_(self.view(name).view(out.shape))

    def compute(self, names: Sequence[str], use: Callable[[Sequence[Tensor]], None]) -> None:
        """See ``TensorSource.compute``; the tensors are on the CPU and must not be changed."""
        use([self.view(name) for name in names])

    def view(self, name: str) -> Tensor:
        """Returns the tensor as a view of the memory-mapped file, which is read when accessed. Thread-safe.

        Raises:
            CheckpointError: the tensor cannot be read.
        """
        stored = self._stored[name]
        try:
            tensor: Tensor = stored.file.get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{stored.name} in {stored.path} cannot be read: {error}") from error
        return tensor[stored.where]


class _StoredTensor(NamedTuple):
    name: str
    """Name in the file."""
    path: Path
    file: Any
    """Open."""
    where: tuple[int | slice, ...] = ()
    """Which part of the tensor in the file it is."""

    def check_shape(self, expected: tuple[int, ...], *, may_be_scalar: bool = False) -> None:
        """Raises ``CheckpointError`` if the tensor in the file has another shape."""
        shape = self.file.get_slice(self.name).get_shape()
        if shape != list(expected) and not (may_be_scalar and not shape):
            raise CheckpointError(
                f"{self.name} in {self.path} has shape {shape}; config.json calls for {list(expected)}"
            )


def _paths(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder, as its index lists them if there is one."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if (content := read_object(index)) is None:
        if not single.exists():
            raise CheckpointError(
                f"{folder} has neither {single.name} nor {index.name}; weights must be safetensors"
            )
        return [single]
    try:
        file_names = sorted(set(content["weight_map"].values()))
    except (KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{index} has no weight_map of tensors' names and their files; fetch the checkpoint again"
        ) from error
    present = set(os.listdir(folder))
    for file_name in file_names:
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(f"{index} names the file {file_name!r}; it must be in the same folder")
        # Compared with the folder's listing: Path.exists raises for names that no file system allows.
        if file_name not in present:
            raise CheckpointError(
                f"{index} names the file {file_name!r}, which does not exist; fetch the checkpoint again"
            )
    return [folder / file_name for file_name in file_names]


def _abbreviated(names: list[str]) -> str:
    """Returns the first three names and the number of the others."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
