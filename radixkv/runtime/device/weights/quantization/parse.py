"""Choice of the format that ``quantization_config`` describes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixkv.errors import CheckpointError, ConfigError
from radixkv.runtime.device.model_config.config_reader import ConfigReader
from radixkv.runtime.device.weights.quantization.fp8 import Fp8Blocks, Fp8Channels
from radixkv.runtime.device.weights.quantization.int4 import Awq, Gptq, PackedInt4
from radixkv.runtime.device.weights.quantization.mxfp4 import Mxfp4
from radixkv.runtime.device.weights.quantization.scheme import WeightScheme

_STORED_IN_ORDER = (None, False, "weight", "static")
"""Values of ``actorder`` with which inputs are stored in order."""
METHODS = ("fp8", "awq", "gptq", "mxfp4", "compressed-tensors", "modelopt")


def parse_scheme(config: Mapping[str, Any], path: Path) -> WeightScheme | None:
    """Returns the format of a checkpoint's quantized matrices; None if it has none, or only scales for K and V.

    Args:
        config: the checkpoint's ``config.json``.
        path: that file, named in errors.

    Raises:
        CheckpointError: the method or one of its settings is not supported.
    """
    section = _section(config)
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise CheckpointError(f"{path}: quantization_config is {section!r}; it must be an object")
    fields = ConfigReader(section, path)
    match method := fields.text("quant_method", ""):
        case "fp8":
            return _fp8(fields)
        case "awq":
            for older, name in (("w_bit", "bits"), ("q_group_size", "group_size")):
                if fields.get(older) is not None:
                    fields = fields.with_value(name, fields.get(older))
            fields.allow_only(bits=4, zero_point=True)
            if (version := fields.text("version", "gemm")).lower() != "gemm":
                raise fields.error(f"version {version!r} is not supported; use 'gemm'")
            return Awq(_group_size(fields))
        case "gptq":
            fields.allow_only(bits=4, is_marlin_format=False)
            size = None if fields.get("group_size") == -1 else _group_size(fields)
            formats = {"gptq": 1, "gptq_v2": 0}
            if (name := fields.text("checkpoint_format", "gptq")) not in formats:
                raise fields.error(f"checkpoint_format {name!r} is not supported; use 'gptq' or 'gptq_v2'")
            return Gptq(size, formats[name], has_order=fields.flag("desc_act"), has_head=fields.flag("lm_head"))
        case "mxfp4":
            return Mxfp4()
        case "compressed-tensors":
            return _compressed_tensors(fields)
        case "modelopt":
            return _modelopt(fields)
    supported = ", ".join(map(repr, METHODS))
    raise fields.error(f"quant_method {method!r} is not supported; this release supports {supported}")


def check_quantization(
    quantization: str | None, config: Mapping[str, Any], scheme: WeightScheme | None, *, has_fp8_products: bool
) -> None:
    """Checks the setting ``quantization`` against a checkpoint's format.

    Args:
        quantization: the setting.
        config: the checkpoint's ``config.json``, whose ``quant_method`` names the format too.
        scheme: of the checkpoint.
        has_fp8_products: whether the device multiplies in FP8.

    Raises:
        ConfigError: the checkpoint has another format, or the device has no FP8 products.
    """
    if quantization is None:
        return
    section = _section(config)
    if isinstance(section, Mapping) and quantization == section.get("quant_method"):
        return
    if scheme is not None:
        if quantization == scheme.name:
            return
        raise ConfigError(
            f"quantization is {quantization!r}, but the checkpoint's weights are in the format {scheme.name}; "
            "leave it out"
        )
    if quantization != "fp8":
        raise ConfigError(
            f"quantization is {quantization!r}, but the checkpoint's weights are not quantized; this release "
            "quantizes such weights to 'fp8' only"
        )
    if not has_fp8_products:
        raise ConfigError("quantization 'fp8' needs a GPU; leave it out, or set device to cuda")


def _section(config: Mapping[str, Any]) -> object:
    return config.get("quantization_config") or config.get("compression_config")  # older compressed-tensors


def _fp8(fields: ConfigReader) -> WeightScheme:
    block = fields.get("weight_block_size")
    return Fp8Channels("tensor") if block is None else Fp8Blocks(_block(fields, block), "weight_scale_inv")


def _compressed_tensors(fields: ConfigReader) -> WeightScheme | None:
    _check_kv_cache_scheme(fields)
    for name in ("transform_config", "sparsity_config"):
        section = fields.get(name)
        if section and not (isinstance(section, Mapping) and section.get("format") == "dense"):
            raise fields.error(f"{name} {section!r} is not supported in this release")
    groups = fields.get("config_groups")
    if not groups and fields.get("kv_cache_scheme") is not None:
        return None
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise fields.error(f"config_groups is {groups!r}; one group is supported")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise fields.error("config_groups must have weights")
    settings = fields.nested(weights)
    settings.allow_only(symmetric=True, dynamic=False)
    kind = f"{settings.get('type')}{settings.get('num_bits')}"
    strategy = settings.get("strategy")
    if kind == "float8" and strategy in ("channel", "tensor"):
        return Fp8Channels(strategy)
    if kind == "float8" and strategy == "block":
        return Fp8Blocks(_block(settings, settings.get("block_structure")), "weight_scale")
    if kind == "int4" and strategy in ("group", "channel"):
        if settings.get("actorder") not in _STORED_IN_ORDER:
            raise fields.error(f"actorder {settings.get('actorder')!r} is not supported; use 'weight' or 'static'")
        fields.allow_only(format="pack-quantized")
        if group.get("input_activations") is not None:
            raise fields.error("input_activations beside 4-bit weights are not supported in this release")
        return PackedInt4(_group_size(settings) if strategy == "group" else None)
    raise fields.error(f"weights of type {kind} with the strategy {strategy!r} are not supported")


def _modelopt(fields: ConfigReader) -> WeightScheme | None:
    """Reads the settings of NVIDIA's Model Optimizer, of which ``hf_quant_config.json`` has most in an object."""
    details = fields.get("quantization")
    if isinstance(details, Mapping):
        fields = fields.nested(details)
    kv_algorithm = fields.text("kv_cache_quant_algo", "")
    if kv_algorithm.upper() not in ("", "FP8"):
        raise fields.error(f"kv_cache_quant_algo {kv_algorithm!r} is not supported in this release; 'FP8' is")
    _check_kv_cache_scheme(fields)
    algorithm = fields.text("quant_algo", "")
    if not algorithm and (kv_algorithm or fields.get("kv_cache_scheme") is not None):
        return None
    if algorithm.upper() != "FP8":
        raise fields.error(f"quant_algo {algorithm!r} of modelopt is not supported in this release; 'FP8' is")
    return Fp8Channels("tensor")


def _check_kv_cache_scheme(fields: ConfigReader) -> None:
    """Refuses scales of K and V other than one in each layer, which ``KVScales`` reads."""
    scheme = fields.get("kv_cache_scheme")
    expected = {"num_bits": 8, "type": "float"}
    if scheme in (None, "FP8"):  # the text is modelopt's
        return
    if (
        not isinstance(scheme, Mapping)
        or any(scheme.get(name) != value for name, value in expected.items())
        or scheme.get("strategy") not in (None, "tensor")
        or scheme.get("dynamic")
        or not scheme.get("symmetric", True)
    ):
        raise fields.error(f"kv_cache_scheme {scheme!r} is not supported; FP8 with one static scale a layer is")


def _group_size(fields: ConfigReader) -> int:
    if (size := fields.count("group_size", 128)) % 8:
        raise fields.error(f"group_size {size} is not supported; it must be a multiple of 8")
    return size


def _block(fields: ConfigReader, value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise fields.error(f"the block of the scales is {value!r}; it must be two positive integers")
    return value[0], value[1]
