"""Resolution of a model's or tokenizer's name to a local folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.checkpoints.embedded import embedded_folder
from radixkv.checkpoints.files import is_integer, read_object
from radixkv.checkpoints.generation_config import read_generation_config
from radixkv.checkpoints.pooling import causal_config, check_classifier, check_reranker, read_normalizes
from radixkv.checkpoints.special_tokens import tokenizer_eos_token_id
from radixkv.checkpoints.text_config import text_fields
from radixkv.errors import CheckpointError
from radixkv.settings.config import LoadFormat, Task

if TYPE_CHECKING:
    from radixkv.checkpoints.hub import FileGroup

TINY = "tiny"
"""The name of the embedded model."""

_MAX_SIZE = 2**63
"""Exclusive upper bound of sizes in ``config.json``."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Checkpoint:
    """A model's folder and the metadata that the frontend and the runtime read from it."""

    name: str
    """The name that the user gave."""
    folder: Path
    """Contains ``config.json``, ``*.safetensors`` (not needed for dummy weights) and ``tokenizer.json`` (not needed
    if all prompts are token ids)."""
    config: Mapping[str, Any]
    """The parsed ``config.json``. Without a ``quantization_config`` in it, ``hf_quant_config.json`` is that, which
    NVIDIA's Model Optimizer writes. The fields of ``text_config``, where there is one, stand beside the others."""
    eos_token_ids: frozenset[int]
    """End-of-sequence tokens of ``config.json``, ``generation_config.json`` and the tokenizer's configuration.

    A fine-tune may name its own in any of them, and keep those of its base model in the others.
    """
    default_sampling: Mapping[str, float | int]
    """Defaults for requests from ``generation_config.json``: any of ``temperature``, ``top_p``, ``top_k``,
    ``min_p``, ``repetition_penalty`` and ``max_new_tokens``."""
    needs_head: bool = True
    """Whether the output head is used; if not, the files may have none."""
    normalizes: bool = True
    """Whether embeddings get length 1."""

    @property
    def has_weights(self) -> bool:
        """Whether all weight files are in the folder. Raises ``CheckpointError``."""
        index = read_object(self.folder / "model.safetensors.index.json")
        files = {"": "model.safetensors"} if index is None else index.get("weight_map")
        present = os.listdir(self.folder)
        return isinstance(files, dict) and all(file in present for file in files.values())

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of token ids. Raises ``CheckpointError``."""
        return self._positive_integer("vocab_size")

    @property
    def hidden_size(self) -> int:
        """Values of a token's hidden state. Raises ``CheckpointError``."""
        return self._positive_integer("hidden_size")

    @property
    def max_position_embeddings(self) -> int:
        """The longest context in tokens. Raises ``CheckpointError``.

        For checkpoints with yarn or linear RoPE scaling this is the original length times the scaling factor; but
        Gemma 3 declares the length with scaling.
        """
        declared = self._positive_integer("max_position_embeddings")
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling")
        if not isinstance(rope, Mapping):
            return declared
        kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
        original = rope.get("original_max_position_embeddings", declared) if kind == "yarn" else declared
        if self.config.get("architectures") == ["Gemma3ForCausalLM"]:
            return declared
        is_scaled = kind in ("yarn", "linear") and is_integer(original) and original >= 1
        if is_scaled and isinstance(factor, int | float) and 1 <= factor < _MAX_SIZE / original:
            return max(declared, int(original * factor))
        return declared

    def _positive_integer(self, key: str) -> int:
        value = self.config.get(key)
        if not is_integer(value) or not 1 <= value < _MAX_SIZE:
            raise CheckpointError(
                f"{self.folder / 'config.json'}: {key} is {value!r}; it must be a positive integer below 2**63"
            )
        return value


def resolve(
    model: str,
    revision: str | None = None,
    *,
    load_format: LoadFormat = "auto",
    tokenizer_folder: Path | None = None,
    task: Task = "generate",
    cache_folder: Path | None = None,
    hub_endpoint: str | None = None,
    show_download: Callable[[str], None] = lambda details: None,
) -> Checkpoint:
    """Finds or downloads the checkpoint that ``model`` names.

    Args:
        model: a folder, a hub name, or ``tiny`` for the embedded model; write a folder named ``tiny`` as
            ``./tiny``.
        revision: a hub repository's branch, tag or commit; None takes ``main``.
        load_format: ``dummy`` neither needs nor downloads weights; it also serves to check all other files first.
        tokenizer_folder: has the tokenizer, which names an end-of-sequence token too; None: the model's folder.
        task: what the model is for.
        cache_folder: the folder for downloaded files; None takes huggingface_hub's own (``HF_HOME``).
        hub_endpoint: the hub's address; None takes huggingface_hub's (``HF_ENDPOINT``).
        show_download: gets a text with the downloaded bytes whenever there are more, from several threads; at the
            end an empty one.

    Raises:
        CheckpointError: there is no such checkpoint, or its files are missing or corrupt.

    Cost: some milliseconds; for a hub name a download at first use, later one request to the hub.
    """
    file_groups: tuple[FileGroup, ...] = (
        ("weights", "config", "tokenizer") if load_format == "auto" else ("config", "tokenizer")
    )
    folder = _locate("model", model, revision, file_groups, cache_folder, hub_endpoint, show_download)
    config = read_object(folder / "config.json")
    if config is None:
        raise CheckpointError(f"{folder} has no config.json; give the folder of a Hugging Face checkpoint")
    if load_format == "auto" and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} has no *.safetensors files, and *.bin files, which can run code, are not loaded; convert "
            f"them with Transformers: AutoModelForCausalLM.from_pretrained({model!r}).save_pretrained('FOLDER')"
        )
    if config.get("quantization_config") is None and (own := read_object(folder / "hf_quant_config.json")):
        config["quantization_config"] = {**own, "quant_method": "modelopt"}
    check_classifier(folder, config)
    config = text_fields(config)
    normalizes = True
    if task == "embed":
        config, normalizes = causal_config(folder, config), read_normalizes(folder)
    elif task == "score":
        check_reranker(folder, config)
    eos_token_ids, default_sampling = read_generation_config(folder, config)
    own_eos = tokenizer_eos_token_id(tokenizer_folder or folder)
    if own_eos is not None:
        eos_token_ids |= {own_eos}
    return Checkpoint(
        model,
        folder,
        config,
        eos_token_ids,
        default_sampling,
        needs_head=task != "embed",
        normalizes=normalizes,
    )


def resolve_tokenizer(
    tokenizer: str,
    revision: str | None = None,
    *,
    cache_folder: Path | None = None,
    hub_endpoint: str | None = None,
    show_download: Callable[[str], None] = lambda details: None,
) -> Path:
    """Finds or downloads a tokenizer and its chat template and returns their folder; see ``resolve``.

    Downloads neither the config nor the weights of a hub repository.

    Raises:
        CheckpointError: there is no such folder or repository, or it has no ``tokenizer.json``.
    """
    folder = _locate("tokenizer", tokenizer, revision, ("tokenizer",), cache_folder, hub_endpoint, show_download)
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(
            f"tokenizer {tokenizer!r}: {folder} has no tokenizer.json; other formats are not supported"
        )
    return folder


def _locate(
    role: str,
    name: str,
    revision: str | None,
    file_groups: tuple[FileGroup, ...],
    cache_folder: Path | None,
    hub_endpoint: str | None,
    show_download: Callable[[str], None],
) -> Path:
    path = Path(os.path.expanduser(name))
    if name == TINY or (name and path.is_dir()):
        if revision is not None:
            raise CheckpointError(
                f"revision {revision!r} is for hub names, and {role} {name!r} is not one; leave the revision out"
            )
        return embedded_folder() if name == TINY else path
    if name and path.exists():
        raise CheckpointError(f"{role} {name!r} is a file; give the folder that contains it")
    if not _HUB_NAME.fullmatch(name):
        raise CheckpointError(
            f"{role} {name!r} is neither an existing folder nor a hub name like 'org/name'; check the path"
        )
    # Imported here because the hub's client takes longer to import than everything else in this package.
    from radixkv.checkpoints.hub import download

    return download(
        name,
        revision,
        file_groups=file_groups,
        role=role,
        cache_folder=cache_folder,
        endpoint=hub_endpoint,
        show_download=show_download,
    )
