"""Safetensors files -> the decoder's tensors, in float32."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from radixkv.checkpoints import Checkpoint
from radixkv.errors import CheckpointError
from radixkv.runtime.device.models.config import DecoderConfig

_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class WeightNames:
    """What an architecture calls each tensor; ``{layer}`` stands for the layer's index."""

    embedding: str
    attention_norm: str
    query: str
    key: str
    value: str
    output: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    final_norm: str
    head: str
    unused: tuple[str, ...]
    """Tensors of older checkpoints that are computed instead."""


_LLAMA = WeightNames(
    embedding="model.embed_tokens.weight",
    attention_norm="model.layers.{layer}.input_layernorm.weight",
    query="model.layers.{layer}.self_attn.q_proj.weight",
    key="model.layers.{layer}.self_attn.k_proj.weight",
    value="model.layers.{layer}.self_attn.v_proj.weight",
    output="model.layers.{layer}.self_attn.o_proj.weight",
    mlp_norm="model.layers.{layer}.post_attention_layernorm.weight",
    gate="model.layers.{layer}.mlp.gate_proj.weight",
    up="model.layers.{layer}.mlp.up_proj.weight",
    down="model.layers.{layer}.mlp.down_proj.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    unused=("model.layers.{layer}.self_attn.rotary_emb.inv_freq",),
)

_NAMES: Mapping[str, WeightNames] = MappingProxyType({"LlamaForCausalLM": _LLAMA})


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Matrices are [out, in]; those that share an input are stacked."""

    attention_norm: Tensor
    query_key_value: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class DecoderWeights:
    """All tensors of a decoder, float32."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor


def read_config(checkpoint: Checkpoint) -> DecoderConfig:
    """The checkpoint's ``config.json``, whose sizes are those in the headers of the weights: other parts can be
    sized by it. Cost: O(tensors), no tensor is read.

    Raises:
        CheckpointError: as ``DecoderConfig.parse`` and ``load_weights``.
    """
    config = DecoderConfig.parse(checkpoint.config, checkpoint.folder / "config.json")
    with ExitStack() as stack:
        _open(checkpoint.folder, config, stack)
    return config


def load_weights(folder: Path, config: DecoderConfig) -> DecoderWeights:
    """Reads ``model.safetensors``, or the files that ``model.safetensors.index.json`` names.

    All headers are checked before a tensor is read. Memory: the weights in float32, and one layer's twice.

    Raises:
        CheckpointError: a file or tensor is missing, corrupt, of a wrong shape or dtype, or not expected.
    """
    names = _NAMES[config.architecture]
    with ExitStack() as stack:
        files = _open(folder, config, stack)
        layers = tuple(_layer(files, names, index) for index in range(config.n_layers))
        embedding = files.read(names.embedding)
        head = embedding if config.tied_head else files.read(names.head)
        return DecoderWeights(embedding, layers, files.read(names.final_norm), head)


def _open(folder: Path, config: DecoderConfig, stack: ExitStack) -> _Files:
    names = _NAMES[config.architecture]
    files = _Files(folder, stack)
    # First, since the names of all layers are listed next, and a corrupt config.json may count a billion.
    files.check_layers(names.attention_norm.partition("{layer}")[0], config.n_layers)
    files.check(_shapes(config, names), _optional(config, names))
    return files


def _layer(files: _Files, names: WeightNames, index: int) -> LayerWeights:
    def read(name: str) -> Tensor:
        return files.read(name.format(layer=index))

    return LayerWeights(
        attention_norm=read(names.attention_norm),
        query_key_value=torch.cat([read(names.query), read(names.key), read(names.value)]),
        output=read(names.output),
        mlp_norm=read(names.mlp_norm),
        gate_up=torch.cat([read(names.gate), read(names.up)]),
        down=read(names.down),
    )


def _shapes(config: DecoderConfig, names: WeightNames) -> dict[str, list[int]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes = {names.embedding: [config.vocab_size, hidden], names.final_norm: [hidden]}
    if not config.tied_head:
        shapes[names.head] = [config.vocab_size, hidden]
    for index in range(config.n_layers):
        for name, shape in (
            (names.attention_norm, [hidden]),
            (names.query, [query, hidden]),
            (names.key, [key, hidden]),
            (names.value, [key, hidden]),
            (names.output, [hidden, query]),
            (names.mlp_norm, [hidden]),
            (names.gate, [inner, hidden]),
            (names.up, [inner, hidden]),
            (names.down, [hidden, inner]),
        ):
            shapes[name.format(layer=index)] = shape
    return shapes


def _optional(config: DecoderConfig, names: WeightNames) -> frozenset[str]:
    unused = {name.format(layer=index) for name in names.unused for index in range(config.n_layers)}
    return frozenset(unused | {names.head}) if config.tied_head else frozenset(unused)


class _Files:
    """The open safetensors files of a folder. Raises ``CheckpointError``."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._file_of: dict[str, Any] = {}
        self._path_of: dict[str, Path] = {}
        for path in _paths(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
                tensors = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is not a whole safetensors file: {error}; fetch it again") from error
            for name in tensors:
                if name in self._file_of:
                    raise CheckpointError(
                        f"{folder}: tensor {name} is in {self._path_of[name].name} and in {path.name}; "
                        "fetch the checkpoint again"
                    )
                self._file_of[name] = file
                self._path_of[name] = path

    def check_layers(self, prefix: str, n_layers: int) -> None:
        """Names only: how many different layers' tensors there are."""
        names = (name for name in self._file_of if name.startswith(prefix))
        n_found = len({name.removeprefix(prefix).partition(".")[0] for name in names})
        if n_found != n_layers:
            raise CheckpointError(
                f"{self._folder / 'config.json'}: num_hidden_layers is {n_layers}, but the safetensors files hold "
                f"{n_found} layers; fetch the checkpoint again"
            )

    def check(self, shapes: Mapping[str, list[int]], optional: frozenset[str]) -> None:
        """Headers only: names, shapes, dtypes."""
        found = self._file_of.keys()
        if missing := sorted(shapes.keys() - found):
            raise CheckpointError(f"{self._folder} lacks {_few(missing)}; fetch the checkpoint again")
        if extra := sorted(found - shapes.keys() - optional):
            raise CheckpointError(
                f"{self._folder} has tensors that its config.json does not call for: {_few(extra)}"
            )
        for name, shape in shapes.items():
            header = self._file_of[name].get_slice(name)
            if header.get_shape() != shape:
                raise CheckpointError(
                    f"{name} in {self._path_of[name]} has shape {header.get_shape()}; config.json calls for {shape}"
                )
            if header.get_dtype() not in _DTYPES:
                raise CheckpointError(
                    f"{name} in {self._path_of[name]} has dtype {header.get_dtype()}; "
                    f"this release reads {', '.join(_DTYPES)}"
                )

    def read(self, name: str) -> Tensor:
        """A copy in float32, independent of the file."""
        try:
            tensor: Tensor = self._file_of[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{name} in {self._path_of[name]} cannot be read: {error}") from error
        return tensor.to(torch.float32, copy=True).contiguous()


def _paths(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if not index.exists():
        if not single.exists():
            raise CheckpointError(
                f"{folder} has neither {single.name} nor {index.name}; weights must be safetensors"
            )
        return [single]
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        file_names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
    for file_name in file_names:
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(f"{index} names the file {file_name!r}; it must lie in the same folder")
        if not (folder / file_name).exists():
            raise CheckpointError(f"{index.name} names {file_name}, which {folder} does not have")
    return [folder / file_name for file_name in file_names]


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
