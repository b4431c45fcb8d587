"""What ``/tokenizer_info`` shows of a tokenizer: the fields of ``tokenizer_config.json``, as vLLM shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from radixkv.checkpoints.special_tokens import read_tokenizer_config

_PATHS = frozenset({"vocab_file", "merges_file", "tokenizer_file", "name_or_path"})
"""Fields that name files of the machine on which the tokenizer was saved."""


def read_tokenizer_info(folder: Path) -> dict[str, Any]:
    """Returns the fields of a tokenizer's configuration, without paths, and with tokens as texts.

    Args:
        folder: the folder of the tokenizer.

    Raises:
        CheckpointError: a file of it cannot be read.
    """
    fields = {name: value for name, value in read_tokenizer_config(folder).items() if name not in _PATHS}
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | {name: _plain(value) for name, value in fields.items()}


def _plain(value: Any) -> Any:
    """Returns a value with the texts of the tokens that it describes in their places."""
    match value:
        case {"content": str(text)}:
            return text
        case dict():
            return {name: _plain(one) for name, one in value.items()}
        case list():
            return [_plain(one) for one in value]
    return value
