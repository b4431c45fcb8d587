"""Assembly of a checkpoint's tensors into the weights of the decoder's layers."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from radixkv.errors import ConfigError
from radixkv.runtime.device.kv_dtype import UNSCALED, LayerScales
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.weights.fp8_matrix import BLOCK, QUANTIZING_BYTES, fp8_bytes
from radixkv.runtime.device.weights.int4_matrix import Int4Groups, int4_bytes
from radixkv.runtime.device.weights.kv_scales import KVScales
from radixkv.runtime.device.weights.layer_weights import (
    AttentionWeights,
    ExpertsBesideWeights,
    ExpertsWeights,
    LayerInputsWeights,
    LayerInputWeights,
    LayerWeights,
    LinearWeights,
    MlpWeights,
    NormWeights,
    Part,
    RecurrentWeights,
    SharedExpertWeights,
    expert_of,
)
from radixkv.runtime.device.weights.matrix_reader import MatrixFormat, MatrixReader
from radixkv.runtime.device.weights.parallel_load import N_LANES
from radixkv.runtime.device.weights.quantization.matrices import QuantizedMatrices
from radixkv.runtime.device.weights.quantization.scheme import WeightScheme
from radixkv.runtime.device.weights.safetensors import RandomTensors, SafetensorsFiles, TensorSource
from radixkv.runtime.device.weights.shapes import (
    TensorShapes,
    layer_shapes,
    stored_projections,
    tensor_shapes,
)
from radixkv.runtime.device.weights.shards import Cut, Shard

logger = logging.getLogger(__name__)

_Tensors = RandomTensors | SafetensorsFiles
_CPU = torch.device("cpu")
_DEQUANTIZING_BYTES = 16
"""Memory for dequantizing one value: 15.7 bytes in AWQ's and GPTQ's formats, 7.5 in others, as measured. Repacking
takes less."""


@dataclass(frozen=True)
class Weights:
    """A decoder's tensors, each read on request into newly allocated memory, so that none is in memory twice."""

    config: DecoderConfig
    source: TensorSource
    dtype: torch.dtype
    device: torch.device
    quantized: QuantizedMatrices | None = None
    """The checkpoint's quantized matrices; None if it has none."""
    stored_kv_scales: KVScales | None = None
    """The scales of K and V in the files; None without files."""
    is_dequantized: bool = False
    """Whether matrices are dequantized."""
    kept: MatrixFormat | None = None
    """The format of matrices that stay quantized; None: none does."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """The parts of matrices that are dequantized whole."""
    head_size: int | None = None
    """Tokens of the output head, if it is not tied; None: all."""

    @cached_property
    def _shapes(self) -> TensorShapes:
        shapes, head = tensor_shapes(self.config), f"{self.config.names.head}.weight"
        if self.head_size is None or head not in shapes:
            return shapes
        return shapes | {head: (self.head_size, self.config.hidden_size)}

    @cached_property
    def _reader(self) -> MatrixReader:
        return MatrixReader(
            self.config.names,
            self._shapes,
            self.source,
            self.dtype,
            self.device,
            self.quantized,
            self.kept,
            self.cuts,
            self._dense_suffixes,
            self._norm_dtype,
        )

    @property
    def _dense_suffixes(self) -> tuple[str, ...]:
        """Ends of the names of matrices that are not kept quantized.

        The rows of some are sorted in memory. Of the inputs of delta nets, the projections to single values decide
        how long a state lasts. Published FP8 checkpoints keep them in 16 bits, so they are not rounded here either.
        """
        config, names = self.config, self.config.names
        suffixes: tuple[str, ...] = ()
        has_whole_heads = self.kept == "channels" or (self.kept == "blocks" and config.head_dim % BLOCK == 0)
        if config.has_output_gate and not has_whole_heads:
            projections = names.query, names.key, names.value
            suffixes += tuple(f"{name.rpartition('{layer}')[2]}.weight" for name in projections)
        recurrent = config.recurrent
        if recurrent is None:
            return suffixes
        parts: tuple[str, ...] = ()
        if isinstance(self.kept, Int4Groups):
            parts = "_qkvz", "_ba", "_qkv", "_z", "_b", "_a", ""
        elif recurrent.is_fused:
            are_whole = self.kept == "channels" or all(size % BLOCK == 0 for size in recurrent.group_sizes)
            parts = ("_ba",) if are_whole else ("_qkvz", "_ba")
        elif self.quantized is None:
            parts = "_b", "_a", ""
        return suffixes + tuple(f".in_proj{part}.weight" for part in parts)

    @property
    def n_bytes(self) -> int:
        """Size of all tensors in memory in bytes; a tied head counts once, with the embedding.

        A matrix counts by its own format, also where it is dequantized because of another one in its stack.
        """
        full = sum(math.prod(self._shapes[name]) for name in self._float32_norms & self._shapes.keys())
        rest = sum(self._bytes_of(name, shape) for name, shape in self._shapes.items())
        return rest + full * (torch.float32.itemsize - self.dtype.itemsize)

    @property
    def _float32_norms(self) -> set[str]:
        """Full names of the weights of norms that are kept in float32."""
        if self._norm_dtype is None:
            return set()
        norms = [name for field, name in asdict(self.config.names).items() if field.endswith("norm")]
        return {f"{name.format(layer=layer)}.weight" for name in norms for layer in range(self.config.n_layers)}

    @property
    def _norm_dtype(self) -> torch.dtype | None:
        return torch.float32 if self.config.norm == "rms_float32" else None

    def _bytes_of(self, name: str, shape: tuple[int, ...]) -> int:
        kept = self._reader.format([name])
        if kept is None:
            return math.prod(shape) * self.dtype.itemsize
        return int4_bytes(shape, kept) if isinstance(kept, Int4Groups) else fp8_bytes(shape, kept)

    @property
    def n_values(self) -> int:
        """Values of all tensors; a tied head counts once, with the embedding."""
        return sum(map(math.prod, self._shapes.values()))

    @property
    def n_quantized_values(self) -> int:
        """Values of the matrices that stay in FP8 or in 4 bits in memory."""
        return sum(
            math.prod(shape) for name, shape in self._shapes.items() if self._reader.format([name]) is not None
        )

    @property
    def has_fp8(self) -> bool:
        """Whether matrices are in FP8."""
        return self.kept is not None and not isinstance(self.kept, Int4Groups)

    @property
    def dequantizing_bytes(self) -> int:
        """Memory for converting matrices while they are loaded, in bytes; 0 if none is converted."""
        matrices = {
            name: math.prod(shape) * (self.cuts[name].n_parts if name in self.cuts else 1)
            for name, shape in self._shapes.items()
            if len(shape) > 1
        }
        largest = max(size for name, size in matrices.items() if self._reader.is_layer_matrix(name))
        if self.is_dequantized or isinstance(self.kept, Int4Groups):
            return _DEQUANTIZING_BYTES * (max(matrices.values()) if self.is_dequantized else largest)
        # Each thread may have read a matrix, and one is quantized at a time.
        return 0 if self.kept is None else N_LANES * largest * self.dtype.itemsize + QUANTIZING_BYTES

    def check_cuts(self, scheme: WeightScheme | None, shard: Shard | None) -> None:
        """Checks that all matrices that stay quantized can be divided among the ranks.

        Args:
            scheme: their format in the files.
            shard: which part the weights are; None: all.

        Raises:
            ConfigError: a rank's part of one would begin within what has one scale, or within a word.
        """
        if scheme is None or shard is None:
            return
        for name, cut in self.cuts.items():
            if self._reader.format([name]) is not None:
                whole, what = cut.size * cut.n_parts, ("outputs", "inputs")[cut.dimension]
                raise ConfigError(
                    f"tensor_parallel_size {shard.n_ranks} would give a rank {cut.size} of the {whole} {what} of "
                    f"{name}, whose format {scheme.name} divides them only by "
                    f"{scheme.unit[cut.dimension]}; use another size"
                )

    @property
    def peak_bytes(self) -> int:
        """Peak memory of constructing a CPU decoder, in bytes.

        It is all tensors, with the largest part twice, because the decoder transposes its matrices. A tied head
        counts too, because it is a transposed copy of the embedding.
        """
        config = self.config
        parts = [
            sum(math.prod(shape) for shape in layer_shapes(config, i).values()) for i in range(config.n_layers)
        ]
        embedding = config.vocab_size * config.hidden_size
        if config.layer_inputs is not None:
            parts.append(config.n_layers * config.layer_inputs.size * config.hidden_size)
        twice = max(embedding, *parts) + (embedding if config.tied_head else 0)
        return self.n_bytes + twice * self.dtype.itemsize + self.dequantizing_bytes

    def embedding(self) -> Tensor:
        """Returns the embedding, [vocab, hidden]. Raises ``CheckpointError``."""
        return self._reader.read(f"{self.config.names.embedding}.weight")

    def head(self) -> Tensor:
        """Returns the output head of a model without a tied head: [vocab, hidden], or the rank's tokens of it.

        Raises:
            CheckpointError: it cannot be read.
        """
        return self._reader.read(f"{self.config.names.head}.weight")

    def position_embedding(self) -> Tensor | None:
        """Returns the learned position embedding, [positions, hidden]; None if there is none.

        Raises:
            CheckpointError: it cannot be read.
        """
        if self.config.n_positions is None:
            return None
        rows = self._reader.read(f"{self.config.names.position_embedding}.weight")
        return rows[self.config.n_unused_positions :]

    def layer_inputs(self) -> LayerInputsWeights | None:
        """Returns the weights that make the inputs of all layers; None if layers have none.

        Raises:
            CheckpointError: one cannot be read.
        """
        if self.config.layer_inputs is None:
            return None
        names, reader = self.config.names, self._reader
        return LayerInputsWeights(
            embedding=reader.read(f"{names.layer_embedding}.weight"),
            projection=reader.linear(names.layer_inputs),
            norm=reader.norm(names.layer_inputs_norm),
            hidden_size=self.config.hidden_size,
        )

    def final_norm(self) -> NormWeights:
        """Returns the weights of the final norm. Raises ``CheckpointError``."""
        return self._reader.norm(self.config.names.final_norm)

    def kv_scales(self) -> tuple[LayerScales, ...]:
        """Reads the scales of a quantized KV cache, [layers]; 1 where the checkpoint has none.

        Raises:
            CheckpointError: a scale is not a finite number above 0, or cannot be read.
        """
        return (
            (UNSCALED,) * len(self.config.attention_layers)
            if self.stored_kv_scales is None
            else self.stored_kv_scales.read()
        )

    def layer(self, index: int) -> LayerWeights:
        """Returns the weights of one layer. Raises ``CheckpointError``."""
        names, config = self.config.names, self.config

        def linear(*parts: str) -> LinearWeights:
            return self._reader.linear(*(name.format(layer=index) for name in parts))

        def norm(name: str) -> NormWeights:
            return self._reader.norm(name.format(layer=index))

        gate_up = (names.gate, names.up) if config.has_gate else (names.up,)
        mixer: AttentionWeights | RecurrentWeights | None = None
        output: LinearWeights | None = None
        if not config.has_mixer(index):
            pass
        elif config.recurrent is not None and index in config.recurrent.layers:
            prefix = names.recurrent.format(layer=index)
            mixer, output = self._recurrent(prefix), self._reader.linear(f"{prefix}out_proj")
        else:
            query_key_value, output_gate = (
                self._gated_attention(index)
                if config.has_output_gate
                else (linear(names.query, *stored_projections(config, index)), None)
            )
            has_key_norm = config.has_query_key_norm and config.heads[index].source is None
            mixer = AttentionWeights(
                query_key_value=query_key_value,
                query_norm=norm(names.query_norm).weight if config.has_query_key_norm else None,
                key_norm=norm(names.key_norm).weight if has_key_norm else None,
                sinks=self._reader.read(names.sinks.format(layer=index)) if config.has_sinks else None,
                output_gate=output_gate,
            )
            output = linear(names.output)
        experts, plain = self._experts(index), None
        are_beside = config.experts is not None and config.experts.are_beside_mlp
        if config.has_plain_mlp(index):
            plain = MlpWeights(linear(*gate_up), linear(names.down))
        layer_input = None
        if config.layer_inputs is not None:
            gate, projection = linear(names.layer_input_gate), linear(names.layer_input_output)
            layer_input = LayerInputWeights(gate, projection, norm(names.after_layer_input_norm))
        beside = None
        if experts is not None and are_beside:
            beside = ExpertsBesideWeights(
                router_scale=self._reader.read(names.router_scale.format(layer=index)),
                norm=norm(names.experts_norm),
                experts=experts,
                after_mlp=norm(names.after_plain_mlp_norm),
                after_experts=norm(names.after_experts_norm),
            )
        return LayerWeights(
            attention_norm=norm(names.attention_norm),
            mixer=mixer,
            output=output,
            after_attention_norm=norm(names.after_attention_norm) if config.has_norms_around else None,
            mlp_norm=norm(names.mlp_norm) if config.halves is None else None,
            mlp=plain or experts,
            after_mlp_norm=norm(names.after_mlp_norm) if config.has_norms_around else None,
            experts_beside=beside,
            layer_input=layer_input,
            scale=self._reader.read(names.layer_scale.format(layer=index)) if config.has_layer_scales else None,
        )

    def _recurrent(self, prefix: str) -> RecurrentWeights:
        log_decay, decay_bias = (
            torch.empty(self._shapes[f"{prefix}{name}"], device=self.device) for name in ("A_log", "dt_bias")
        )
        self._reader.fill(f"{prefix}A_log", log_decay)
        self._reader.fill(f"{prefix}dt_bias", decay_bias)
        if (recurrent := self.config.recurrent) is not None and recurrent.mamba2 is not None:
            skip = torch.empty_like(log_decay)
            self._reader.fill(f"{prefix}D", skip)
            linear = self._reader.linear(f"{prefix}in_proj")
            bias = f"{prefix}conv1d.bias"
            return RecurrentWeights(
                inputs=linear,
                convolution=self._reader.read(f"{prefix}conv1d.weight").squeeze(1),
                log_decay=log_decay,
                decay_bias=decay_bias,
                norm=self._reader.read(f"{prefix}norm.weight"),
                convolution_bias=self._reader.read(bias) if bias in self._shapes else None,
                skip=skip,
            )
        inputs, gates = self._delta_net_inputs(prefix)
        return RecurrentWeights(
            inputs=inputs,
            convolution=self._reader.read(f"{prefix}conv1d.weight").squeeze(1),
            log_decay=log_decay,
            decay_bias=decay_bias,
            norm=self._reader.read(f"{prefix}norm.weight"),
            gates=gates,
        )

    def _delta_net_inputs(self, prefix: str) -> tuple[LinearWeights, LinearWeights | None]:
        """Returns ``inputs`` and ``gates`` of ``RecurrentWeights``."""
        config, reader = self.config.recurrent, self._reader
        assert config is not None, "other models have none"
        if not config.is_fused:
            parts = [f"{prefix}in_proj_{part}" for part in ("qkv", "z", "b", "a")]
            names = [f"{part}.weight" for part in parts]
            if reader.format(names) is None and reader.format(names[:2]) is not None:
                return reader.linear(*parts[:2]), reader.linear(*parts[2:])
            return reader.linear(*parts), None
        # In the files each key head has the rows of its queries, keys, values and gates one after the other.
        n_groups, hidden, name = config.n_key_heads, self.config.hidden_size, f"{prefix}in_proj_qkvz.weight"
        sizes, gate_sizes = [n_groups * size for size in config.group_sizes], [config.n_value_heads] * 2
        kept = reader.format([name])
        dense = reader.dense(sum(gate_sizes) if kept else config.n_inputs, hidden)
        *first, strength, decay = dense.split(gate_sizes if kept else [*sizes, *gate_sizes])
        inputs = reader.empty((sum(sizes), hidden), kept) if kept else dense
        reader.fill_interleaved(name, inputs.split(sizes) if kept else first, n_groups)
        reader.fill_interleaved(f"{prefix}in_proj_ba.weight", (strength, decay), n_groups)
        return LinearWeights(inputs), LinearWeights(dense) if kept else None

    def _gated_attention(self, layer: int) -> tuple[LinearWeights, LinearWeights]:
        """Returns the projection of queries, keys and values, and that of the output's gates.

        In the files each head of the queries has its gate's rows after its own.
        """
        config, names, reader = self.config, self.config.names, self._reader
        n_queries, n_keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        query, *others = (name.format(layer=layer) for name in (names.query, names.key, names.value))
        kept = reader.format([f"{name}.weight" for name in (query, *others)])
        stacked = reader.empty((n_queries + 2 * n_keys, config.hidden_size), kept)
        queries, keys, values = stacked.split([n_queries, n_keys, n_keys])
        gates = reader.empty((n_queries, config.hidden_size), kept)
        reader.fill_interleaved(f"{query}.weight", (queries, gates), config.n_heads)
        for name, part in zip(others, (keys, values), strict=True):
            reader.fill(f"{name}.weight", part)
        rows_of_heads = torch.arange(2 * n_queries).view(config.n_heads, 2, config.head_dim)
        parts = (
            Part(query, n_queries, rows_of_heads[:, 0].flatten()),
            *(Part(name, n_keys) for name in others),
        )
        gate_part = Part(query, n_queries, rows_of_heads[:, 1].flatten())
        return LinearWeights(stacked, parts=parts), LinearWeights(gates, parts=(gate_part,))

    def _experts(self, layer: int) -> ExpertsWeights | None:
        experts, names = self.config.experts_of(layer), self.config.names
        if experts is None:
            return None
        n_experts, n_inner, hidden = experts.n_experts, experts.inner_size, self.config.hidden_size
        reader = self._reader
        router, correction = reader.linear(names.router.format(layer=layer)), None
        if experts.sigmoid is not None:
            weight = torch.empty(n_experts, hidden, device=self.device)
            correction = torch.empty(n_experts, device=self.device)
            reader.fill(f"{names.router.format(layer=layer)}.weight", weight)
            reader.fill(names.router_correction.format(layer=layer), correction)
            router = LinearWeights(weight)
        if experts.are_stacked:
            # The files have [experts, in, out], in which gate and up alternate.
            gate_up, down = (
                reader.dense(n_experts, 2 * n_inner, hidden),
                reader.dense(n_experts, hidden, n_inner),
            )
            full = names.stacked_gate_up.format(layer=layer)
            reader.fill(full, gate_up.view(n_experts, 2, n_inner, hidden).permute(0, 3, 2, 1))
            gate_up_bias = reader.dense(n_experts, 2 * n_inner)
            reader.fill(f"{full}_bias", gate_up_bias.view(n_experts, 2, n_inner).transpose(1, 2))
            full = names.stacked_down.format(layer=layer)
            reader.fill(full, down.transpose(1, 2))
            return ExpertsWeights(
                router,
                LinearWeights(gate_up, gate_up_bias),
                LinearWeights(down, reader.read(f"{full}_bias")),
            )
        # If one expert has 16 bits, all experts of its layer are kept in 16 bits.
        found = {reader.format(self._expert_names(layer, index)) for index in range(n_experts)}
        kept = found.pop() if len(found) == 1 else None
        sizes = [n_inner] * (2 if self.config.has_gate else 1)
        matrices = [reader.empty((n_experts, *shape), kept) for shape in ((sum(sizes), hidden), (hidden, n_inner))]
        for index in range(n_experts):
            one, other = (expert_of(stacked, index) for stacked in matrices)
            for name, part in zip(self._expert_names(layer, index), (*one.split(sizes), other), strict=True):
                reader.fill(name, part)
        one_matrix, other_matrix = map(LinearWeights, matrices)
        scales = reader.read(names.expert_scales.format(layer=layer)) if experts.are_beside_mlp else None
        return ExpertsWeights(router, one_matrix, other_matrix, self._shared_expert(layer), correction, scales)

    def _shared_expert(self, layer: int) -> SharedExpertWeights | None:
        names, experts = self.config.names, self.config.experts
        if experts is None or experts.shared_inner_size is None:
            return None
        gate, up, down, weight = (
            name.format(layer=layer)
            for name in (names.shared_gate, names.shared_up, names.shared_down, names.shared_weight)
        )
        gate_up = (gate, up) if self.config.has_gate else (up,)
        mlp = MlpWeights(self._reader.linear(*gate_up), self._reader.linear(down))
        return SharedExpertWeights(mlp, None if experts.sigmoid is not None else self._reader.linear(weight))

    def _expert_names(self, layer: int, expert: int) -> list[str]:
        """Returns the names of the gate (if any), up and down projection of one expert that is in no stack."""
        names = self.config.names
        parts = [names.expert_up, names.expert_down]
        if self.config.has_gate:
            parts.insert(0, names.expert_gate)
        return [f"{part.format(layer=layer, expert=expert)}.weight" for part in parts]
