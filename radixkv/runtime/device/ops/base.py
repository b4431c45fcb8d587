"""The operations of a device, from which the decoder is composed.

``CpuOperations`` and ``CudaOperations`` build them from weights, in the form that their kernels need. ``add`` and
``add_and_norm`` do one operation after the other, unless a device overrides them with fused kernels. A norm is
built for the operation that reads its output: this decides whether the norm writes FP8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from radixkv.runtime.device.kv_dtype import LayerScales
from radixkv.runtime.device.model_config.experts import ExpertConfig
from radixkv.runtime.device.model_config.heads import LayerHeads
from radixkv.runtime.device.model_config.rope import Rope
from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.pack import ArrayT
from radixkv.runtime.device.weights.layer_weights import (
    ExpertsBesideWeights,
    ExpertsWeights,
    LayerInputWeights,
    LinearWeights,
    MlpWeights,
    NormWeights,
    RecurrentWeights,
)


@dataclass(frozen=True)
class TokenInputs:
    """The tokens of a step; int32 on CUDA, int64 on the CPU."""

    ids: Tensor
    """[tokens]."""
    positions: Tensor
    """[tokens]: position of each token in its own sequence."""
    slot_mapping: Tensor
    """[tokens]: index of each token's K and V in the memory of a layer, as ``page * pitch + offset``, where
    ``pitch`` are the tokens from the beginning of one page to that of the next; -1 stores nothing."""

    sequences: Sequences = ()
    """The rows of the step, for layers that have states."""
    in_windows: TokenInputs | None = None
    """The same tokens with their places in window pages; None: all layers are in the same pages."""

    def first(self, n_tokens: int) -> TokenInputs:
        """Returns views of the first ``n_tokens`` tokens, for layers without states."""
        in_windows = None if self.in_windows is None else self.in_windows.first(n_tokens)
        return TokenInputs(
            self.ids[:n_tokens], self.positions[:n_tokens], self.slot_mapping[:n_tokens], in_windows=in_windows
        )


class TokenSpan(NamedTuple):
    """Consecutive tokens of a row among those of a step."""

    batch_slot: int
    first: int
    n_tokens: int
    """0 where nothing is to be done but to save the states."""
    start: int
    """Position of the first token in its sequence."""
    saved_to: int | None = None
    """Slot that gets a copy of the states after these tokens."""


BLOCK_TOKENS = 64
"""Tokens that CUDA's kernels compute together in a layer with states."""


class BlockArrays(NamedTuple, Generic[ArrayT]):
    """The rows of prompts, and the blocks of their tokens: int32 arrays on the host or tensors on the device."""

    rows: ArrayT
    """[rows, 8]: batch slot, start, number of tokens, index of the first token in the step, index of the first
    block, and padding."""
    blocks: ArrayT
    """[blocks, 2]: row, and the slot of states that gets a copy of the states after the block; -1: none does."""


@dataclass(frozen=True)
class DeviceSequences:
    """The rows of a step on CUDA: rows of one token each, then rows of prompts.

    Batch slots from ``n_batch_slots`` on are padding: their rows start with empty states, and change none.
    """

    n_batch_slots: int
    batch_slots: Tensor
    """[decode rows] int32; token i is that of row i."""
    starts: Tensor
    """[decode rows] int32: position of each row's token."""
    prompts: BlockArrays[Tensor] | None = None


Sequences = tuple[TokenSpan, ...] | DeviceSequences
"""Which tokens of a step belong together: spans on the CPU, tensors on CUDA."""


class LayerStates(NamedTuple):
    """The states of a gated delta net, of each batch slot and then of each slot of the tree."""

    inputs: Tensor
    """[slots, taps - 1, channels]: what the convolution saw last."""
    memory: Tensor
    """[slots, value heads, key_dim, value_dim] float32."""


RowScales = Literal["rows", "groups"]
"""What has a scale in rows of FP8: each row, or each 128 values of a row."""
ROW_UNIT = 4
"""Rows of FP8 with groups are padded to a multiple of it, as cuBLAS wants them."""


def padded_rows(n_rows: int) -> int:
    """Returns the least multiple of ``ROW_UNIT`` of at least ``n_rows``."""
    return -(-n_rows // ROW_UNIT) * ROW_UNIT


@dataclass(frozen=True)
class Fp8Rows:
    """Rows of activations, rounded to FP8 (e4m3): ``values * scales``."""

    n_rows: int
    values: Tensor
    """[rows, size] e4m3. With groups further rows make their number a multiple of ``ROW_UNIT``."""
    scales: Tensor
    """float32: [rows, 1], or [rows, ceil(size / 128)] stored by columns, with as many rows as ``values``."""
    dtype: torch.dtype
    """Dtype of the activations before they were rounded."""
    unrounded: Tensor | None = None
    """[rows, size], contiguous: the rows before they were rounded; None where nothing reads these."""

    def part(self, first: int, last: int) -> Fp8Rows:
        """Returns rows ``first`` to ``last``, without the latter, as views."""
        unrounded = None if self.unrounded is None else self.unrounded[first:last]
        return Fp8Rows(last - first, self.values[first:last], self.scales[first:last], self.dtype, unrounded)


Rows = Tensor | Fp8Rows
"""[rows, size]: what a norm writes for the product that reads it."""


def as_tensor(rows: Rows) -> Tensor:
    """Returns rows as they are before they are rounded to FP8."""
    unrounded = rows if isinstance(rows, Tensor) else rows.unrounded
    assert unrounded is not None, "a norm writes FP8 alone only for products that read nothing else"
    return unrounded


def n_rows_of(rows: Rows) -> int:
    """Returns the number of rows, without padding."""
    return len(rows) if isinstance(rows, Tensor) else rows.n_rows


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """Returns ``x * sigmoid(gate)``, in which an element's place changes no bit.

    Args:
        x: [rows, size].
        gate: [rows, size], or [rows, 1]; overwritten if it is float32.
    """
    return (x.float() / gate.float().neg_().exp_().add_(1.0)).to(x.dtype)


@dataclass(frozen=True)
class RmsFields:
    """An RMS norm, as a kernel takes it that computes it together with what comes before."""

    weight: Tensor
    eps: float
    adds_one: bool = False
    """Whether it multiplies by ``weight + 1``, and rounds only after that."""
    out_scales: RowScales | None = None
    """Scales of its output in FP8; None for an output in the dtype of the weight."""
    keeps_unrounded: bool = False
    """Whether an output in FP8 is also written as it was before it was rounded."""


class Norm(Protocol):
    """A norm over rows with its weights."""

    @property
    def fused(self) -> RmsFields | None:
        """What a kernel needs to compute the norm together with what comes before; None: no kernel does."""
        return None

    def __call__(self, x: Tensor) -> Rows:
        """Norms [rows, hidden]."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Rows:
        """Adds ``x`` to ``residual``, which is changed, and norms the sum. All are [rows, hidden]."""
        return self(residual.add_(x))


class RowReader(Protocol):
    """What reads rows that a norm may round to FP8."""

    @property
    def input_scales(self) -> RowScales | None:
        """Scales of the rows that it reads in FP8; None if it reads tensors."""
        return None

    @property
    def reads_unrounded(self) -> bool:
        """Whether it reads rows in FP8 also as they were before they were rounded."""
        return False


class NormReader(RowReader, Protocol):
    """What maps a norm's output: a matrix product or an MLP."""

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """Maps [rows, in] to [rows, out], in ``out`` if it is given. ``out`` may not be ``x``."""
        ...

    def add_and_norm(self, x: Rows, residual: Tensor, norm: Norm) -> Rows:
        """Adds the output for ``x`` to ``residual``, and norms the sum.

        Args:
            x: [rows, in].
            residual: [rows, hidden]; changed.
            norm: of the sum.

        Returns:
            [rows, hidden].
        """
        return norm.add(self(x), residual)


class Linear(NormReader, Protocol):
    """A matrix product with an optional bias."""


class Mlp(NormReader, Protocol):
    """A dense MLP, or a mixture of experts: from [rows, hidden] to [rows, hidden]."""


class RotateAndStore(Protocol):
    """What is between the QKV projection and attention: head norms, rotary embedding and the KV write."""

    def __call__(self, qkv: Tensor, inputs: TokenInputs, k_cache: Tensor, v_cache: Tensor, q_out: Tensor) -> None:
        """Stores K and V in the pool, in its dtype, and rotated queries in ``q_out``.

        Args:
            qkv: [tokens, (heads + 2 * kv_heads) * head_dim]; without values where these are the keys, and queries
                alone where K and V are another layer's, which are stored.
            inputs: the tokens.
            k_cache, v_cache: of one layer, in the layout of the device's pool.
            q_out: [tokens, heads, head_dim].
        """
        ...


class RecurrentLayer(RowReader, Protocol):
    """A gated delta net or a layer of Mamba2, up to the projection of its output.

    It has three parts. Only the middle one depends on which tokens belong together, so graphs can have the others.
    """

    def project(self, normed: Rows, out: Tensor) -> None:
        """Computes the layer's inputs.

        Args:
            normed: [tokens, hidden].
            out: [``padded_rows(tokens)``, ``RecurrentConfig.n_inputs``], contiguous. What is written behind the
                tokens has no meaning.
        """
        ...

    def scan(self, projected: Tensor, sequences: Sequences, states: LayerStates, out: Tensor) -> None:
        """Computes what each token reads of its sequence's state.

        Args:
            projected: what ``project`` has computed.
            sequences: which tokens belong together. A row that starts at position 0 starts with empty states.
            states: changed to those after the rows' last tokens.
            out: [tokens, value heads * value_dim]; tokens of the rows are written.
        """
        ...

    def finish(self, projected: Tensor, read: Tensor) -> Tensor:
        """Returns what the tokens have read, gated and normed. ``read``, which ``scan`` has written, may change."""
        ...


class RoutedExperts(Protocol):
    """A mixture of experts whose router reads other rows than its experts."""

    def mixed(self, x: Tensor, routed: Tensor, out: Tensor | None = None) -> Tensor:
        """Maps rows as the experts do that the router selects for others.

        Args:
            x: [rows, hidden], what the experts compute.
            routed: [rows, hidden], what the router reads.
            out: [rows, hidden]; None allocates it.
        """
        ...


class ExpertsBeside(Protocol):
    """A mixture of experts that computes the residual stream beside a layer's MLP."""

    def __call__(self, computed: Tensor, residual: Tensor) -> Tensor:
        """Returns the sum of the normed outputs of MLP and experts.

        Args:
            computed: [tokens, hidden], output of the MLP.
            residual: [tokens, hidden], the residual stream before the MLP.
        """
        ...


class LayerInput(Protocol):
    """What a layer's own input adds to the residual stream."""

    def __call__(self, residual: Tensor, layer_input: Tensor) -> Tensor:
        """Returns what is added, [tokens, hidden].

        Args:
            residual: [tokens, hidden].
            layer_input: [tokens, size], of this layer.
        """
        ...


class Operations(Protocol):
    """Builds the operations of a decoder from its weights.

    Output projections, MLPs and experts are built in the order in which they compute: ranks sum what these give in
    two memories, in turn.

    On a GPU these are still being loaded meanwhile: nothing here may read their values.
    """

    def linear(self, weights: LinearWeights) -> Linear:
        """Returns a matrix product."""
        ...

    def output(self, weights: LinearWeights) -> Linear:
        """Returns attention's output projection."""
        ...

    def head(self, weights: LinearWeights) -> Linear:
        """Returns the product that gives logits, of [vocab, hidden]."""
        ...

    def norm(self, weights: NormWeights, reader: RowReader | None = None) -> Norm:
        """Returns a norm of the model's kind.

        Args:
            weights: of the norm.
            reader: the only one that reads its output. Without one the norm writes tensors.
        """
        ...

    def mlp(self, weights: MlpWeights) -> Mlp:
        """Returns a dense MLP."""
        ...

    def recurrent_layer(self, weights: RecurrentWeights, config: RecurrentConfig) -> RecurrentLayer:
        """Returns a gated delta net or a layer of Mamba2. Sizes without a kernel are refused before."""
        ...

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """Returns ``x * sigmoid(gate)``, of attention's output and its gate: [tokens, size]. Both may change."""
        ...

    def capped(self, logits: Tensor, cap: float) -> Tensor:
        """Overwrites logits, [rows, vocab], by ``cap * tanh(logits / cap)``, and returns them."""
        ...

    def experts(self, weights: ExpertsWeights, config: ExpertConfig) -> Mlp:
        """Returns a mixture of experts. Raises ``ConfigError`` where its activation has no kernel."""
        ...

    def routed_experts(self, weights: ExpertsWeights, config: ExpertConfig) -> RoutedExperts:
        """Returns a mixture of experts for ``experts_beside``. Raises what ``experts`` does."""
        ...

    def experts_beside(self, weights: ExpertsBesideWeights, experts: RoutedExperts) -> ExpertsBeside:
        """Returns experts beside an MLP; ``experts`` are those of ``weights``."""
        ...

    def layer_input(self, weights: LayerInputWeights) -> LayerInput:
        """Returns what a layer's own input adds."""
        ...

    def rotate_and_store(
        self,
        heads: LayerHeads,
        rope: Rope | None,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        scales: LayerScales,
    ) -> RotateAndStore:
        """Returns the operation of a layer.

        Args:
            heads: of the layer.
            rope: rotary embedding; None rotates nothing.
            query_norm, key_norm: [head_dim], weights of an RMS norm over each head; both or neither, but
                that a layer without own K has no norm for it.
            scales: with which K and V are stored if the pool's dtype is quantized.
        """
        ...
