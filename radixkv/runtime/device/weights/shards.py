"""The part of a checkpoint's tensors that one rank computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from torch import Tensor

from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.weights.quantization.matrices import QuantizedMatrices
from radixkv.runtime.device.weights.quantization.scheme import WeightScheme, can_cut
from radixkv.runtime.device.weights.safetensors import TensorViews
from radixkv.runtime.device.weights.shapes import row_sections, tensor_shapes

_TOKENS = 64
"""Parts of the output head have multiples of so many tokens, for which products have the fastest kernels."""


class Shard(NamedTuple):
    """Which part of a model a rank has."""

    rank: int
    n_ranks: int

    def cut(self, shape: tuple[int, ...], part: tuple[int, ...], sections: Sequence[int] = (1,)) -> Cut | None:
        """Returns where the rank's part of a tensor is; None: it has all of it.

        A tensor is cut in the dimension in which the shape of a part differs. Where there are fewer parts than
        ranks, as of KV heads, several ranks have the same part.

        Args:
            shape: of the tensor.
            part: shape of the part.
            sections: shares of that dimension, of each of which the rank has a part.
        """
        if shape == part:
            return None
        (dimension,) = (d for d, size in enumerate(part) if size != shape[d])
        n_parts = shape[dimension] // part[dimension]
        assert n_parts * part[dimension] == shape[dimension], "parts are equal"
        sizes = [shape[dimension] * section // sum(sections) for section in sections]
        assert not any(size % n_parts for size in sizes), "parts of sections are equal"
        index = self.rank * n_parts // self.n_ranks
        spans = [(first + index * (size // n_parts), size // n_parts) for first, size in _with_firsts(sizes)]
        return Cut(dimension, tuple(spans), n_parts)

    def cuts(self, config: DecoderConfig) -> dict[str, Cut]:
        """Returns where the rank's parts of a model's tensors are, by name; it has all of those that are left out.

        Args:
            config: of the whole model.
        """
        parts, sections = tensor_shapes(config.shard(self.n_ranks)), row_sections(config)
        cuts = {
            name: self.cut(shape, parts[name], sections.get(name, (shape[0],)))
            for name, shape in tensor_shapes(config).items()
        }
        return {name: cut for name, cut in cuts.items() if cut is not None}

    def head(self, vocab_size: int) -> Cut:
        """Returns which tokens the rank computes logits of, where ranks divide the output head.

        At the end of the vocabulary ranks have some of the same tokens.
        """
        size = min(vocab_size, -(-vocab_size // (self.n_ranks * _TOKENS)) * _TOKENS)
        return Cut(0, ((min(self.rank * size, vocab_size - size), size),), self.n_ranks)


def _with_firsts(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns sizes, each with the sum of those before it."""
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))


class Cut(NamedTuple):
    """A part of a tensor."""

    dimension: int
    spans: tuple[tuple[int, int], ...]
    """First index and size of each run of indices, one in each section of the tensor."""
    n_parts: int
    """Parts that make up the tensor."""

    @property
    def size(self) -> int:
        """Indices of the part."""
        return sum(size for _, size in self.spans)

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the part: a view, which may have gaps between its rows, or a copy if there are several spans."""
        parts = [tensor.narrow(self.dimension, *span) for span in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dimension)


@dataclass(frozen=True)
class Cuts:
    """Which parts of a checkpoint's tensors a rank has."""

    stored: Mapping[str, Cut]
    """Where tensors are cut as they are read."""
    dequantized: Mapping[str, Cut]
    """Where matrices are cut after they are dequantized, because their groups of scales do not divide."""
    of_rank_0: frozenset[str]
    """What is added to a sum over ranks, the biases of attention's output, of MLPs' and of the shared expert's."""

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        shard: Shard,
        scheme: WeightScheme | None,
        quantized: QuantizedMatrices | None,
        *,
        divides_head: bool = False,
    ) -> Self:
        """Returns a rank's parts.

        Args:
            config: of the whole model.
            shard: the rank's.
            scheme: format of quantized matrices; None: there are none.
            quantized: the matrices that are quantized; None: those of ``scheme`` are, and are read dense.
            divides_head: whether ranks divide the output head, see ``Shard.head``, and a rank has only its part of
                one that is not tied.
        """
        head = f"{config.names.head}.weight"
        shapes, parts = tensor_shapes(config), tensor_shapes(config.shard(shard.n_ranks))
        sections, cuts = row_sections(config), shard.cuts(config)
        if divides_head and head in shapes:
            cuts[head] = shard.head(config.vocab_size)
        stored: dict[str, Cut] = {}
        dequantized: dict[str, Cut] = {}
        for name, cut in cuts.items():
            shape, part = shapes[name], parts[name]
            rows = sections.get(name, (shape[0],))
            is_quantized = scheme is not None and (len(shape) > 1 if quantized is None else name in quantized)
            # The parts of a head may overlap.
            is_whole = False
            if is_quantized and scheme is not None:
                of_sections = [((n, *shape[1:]), (n * part[0] // shape[0], *part[1:])) for n in rows]
                is_whole = name == head or not all(can_cut(scheme, *one) for one in of_sections)
            if is_whole:
                dequantized[name] = cut
            if not is_quantized or quantized is None:
                stored[name] = cut
            elif not is_whole:
                found = {one: shard.cut(*shapes, rows) for one, shapes in quantized.cut(name, part).items()}
                stored |= {one: cut for one, cut in found.items() if cut is not None}
        names = config.names
        of_rank_0 = {
            f"{name.format(layer=layer)}{bias}"
            for layer in range(config.n_layers)
            for name, bias in (
                *((one, ".bias") for one in (names.output, names.down, names.shared_down)),
                (names.stacked_down, "_bias"),
            )
        }
        return cls(stored, dequantized, frozenset(of_rank_0))


class ShardedTensors:
    """The ``TensorViews`` and the ``TensorSource`` of the part of each tensor that a rank has.

    What is added to a sum over ranks is rank 0's; the others have zeros.

    Args:
        views: of the whole tensors.
        cuts: the rank's.
        is_first: whether it is rank 0.
    """

    def __init__(self, views: TensorViews, cuts: Cuts, *, is_first: bool) -> None:
        self._views = views
        self._cuts = cuts
        self._is_first = is_first

    def view(self, name: str) -> Tensor:
        """See ``TensorViews.view``. A part may have gaps between its rows."""
        whole = self._views.view(name)
        if name in self._cuts.of_rank_0 and not self._is_first:
            return torch.zeros_like(whole)
        cut = self._cuts.stored.get(name)
        return whole if cut is None else cut.of(whole)

    def fill(self, name: str, out: Tensor) -> None:
        """See ``TensorSource.fill``."""
        out.copy_(self.view(name).view(out.shape))

    def compute(self, names: Sequence[str], use: Callable[[Sequence[Tensor]], None]) -> None:
        """See ``TensorSource.compute``."""
        use([self.view(name) for name in names])
