"""The head of a checkpoint whose ``config.json`` says that it is the embedding."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor

from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.weights.quantization.scheme import WeightScheme
from radixkv.runtime.device.weights.safetensors import SafetensorsFiles

logger = logging.getLogger(__name__)

_ROWS_AT_A_TIME = 4096
"""Rows that are compared at a time, so that little memory is needed."""


def check_tied_head(
    config: DecoderConfig, files: SafetensorsFiles, scheme: WeightScheme | None, dtype: torch.dtype
) -> DecoderConfig:
    """Returns the configuration with ``tied_head`` as the files have it.

    As in Transformers 5, the head is the embedding unless the files have both and they differ. If the files have
    only a head, it is the embedding too, and is renamed. Reads both matrices, as far as they are equal.

    Args:
        config: of the checkpoint.
        files: of the checkpoint.
        scheme: its format of quantized matrices; a quantized head is never the embedding.
        dtype: in which the matrices are compared, because they are loaded in it.

    Raises:
        CheckpointError: a matrix cannot be read.
    """
    if not config.tied_head:
        return config
    head, embedding = (f"{name}.weight" for name in (config.names.head, config.names.embedding))
    is_quantized = scheme is not None and f"{config.names.head}.{scheme.mark}" in files.names
    if not is_quantized:
        if head not in files.names:
            return config
        if embedding not in files.names:
            files.rename(head, embedding)
            return config
        if _are_equal(files.view(head), files.view(embedding), dtype):
            return config
    logger.warning(
        "config.json ties the output head to the embedding, but the weight files have a %s that differs from %s. "
        "It is used; set tie_word_embeddings to false in config.json to hide this warning",
        config.names.head,
        config.names.embedding,
    )
    return replace(config, tied_head=False)


def _are_equal(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    return one.shape == other.shape and all(
        torch.equal(a.to(dtype), b.to(dtype))
        for a, b in zip(one.split(_ROWS_AT_A_TIME), other.split(_ROWS_AT_A_TIME), strict=True)
    )
