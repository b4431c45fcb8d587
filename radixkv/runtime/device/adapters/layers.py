"""Products and MLPs whose rows may belong to adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from radixkv.runtime.device.adapters.rows import AdapterRows, StepRows
from radixkv.runtime.device.ops.base import Linear, Mlp, Rows, as_tensor


@dataclass(frozen=True)
class LoraPair:
    """What an adapter adds to some columns of a product: ``scale * B @ A @ x``."""

    columns: slice
    """Columns of the product."""
    a: Linear
    """From [rows, in] to [rows, rank]."""
    b: Linear
    """From [rows, rank] to [rows, columns]."""
    scale: float


class LoraLinear(Linear):
    """A product to which the adapters of a step's rows add theirs.

    A row's result depends on that row alone if this is true of the products, bit for bit: what an adapter adds is
    computed from its rows alone, and added to each element once.

    Args:
        base: the product of the base model.
        pairs: by digest of an adapter: its pairs. Their columns do not overlap.
        step: the rows of the step that is computed.
    """

    def __init__(self, base: Linear, pairs: Mapping[str, Sequence[LoraPair]], step: StepRows) -> None:
        self._base = base
        self._pairs = pairs
        self._step = step

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.Linear``. ``x`` has all rows of the step."""
        return self.of_rows(x, self._step.whole, out)

    def of_rows(self, x: Rows, rows: AdapterRows, out: Tensor | None = None) -> Tensor:
        """Maps some rows of the step, [rows, in] to [rows, out], in ``out`` if it is given."""
        y = self._base(x, out)
        if not rows.indices:
            return y
        inputs = as_tensor(x)
        assert len(inputs) == rows.n_rows, "the plan of the step has other rows"
        for adapter, indices in rows.indices.items():
            pairs = self._pairs.get(adapter)
            if pairs is None:
                continue
            own = inputs if len(indices) == rows.n_rows else inputs[indices]
            for pair in pairs:
                added = pair.b(pair.a(own).mul_(pair.scale))
                y[:, pair.columns].index_add_(0, indices, added)
        return y


class LoraMlp(Mlp):
    """A dense MLP over products to which adapters may add theirs.

    Args:
        gate_up: the first product, of a gate and what it multiplies, or without a gate.
        down: the last product.
        activated: computes what is between them, row by row.
        step: the rows of the step that is computed.
    """

    def __init__(
        self, gate_up: LoraLinear, down: LoraLinear, activated: Callable[[Tensor], Tensor], step: StepRows
    ) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activated = activated
        self._step = step

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.Mlp``. ``x`` has all rows of the step."""
        inputs, whole = as_tensor(x), self._step.whole
        y = inputs.new_empty(whole.n_rows, inputs.shape[1]) if out is None else out
        for rows in self._step.chunks:
            own = slice(rows.first, rows.last)
            y[own] = self._down.of_rows(self._activated(self._gate_up.of_rows(inputs[own], rows)), rows)
        return y
