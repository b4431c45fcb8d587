"""The special tokens that a tokenizer's configuration names, such as its end of sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from radixkv.checkpoints.files import read_object, read_text
from radixkv.errors import CheckpointError


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    """The part of ``tokenizer.json`` that has the ids of added tokens, as special tokens are."""

    added_tokens: list[_AddedToken] | None = None
    model: msgspec.Raw = msgspec.Raw(b"{}")


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}
    """The ids by token, or the tokens with their scores in order of their ids."""


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Returns the fields of ``tokenizer_config.json``, and the right special tokens. Raises ``CheckpointError``."""
    config = read_object(folder / "tokenizer_config.json") or {}
    # In older checkpoints, without ``added_tokens_decoder``, special_tokens_map.json has the right ones.
    older = {} if "added_tokens_decoder" in config else read_object(folder / "special_tokens_map.json") or {}
    return {**config, **older}


def named_special_tokens(folder: Path) -> dict[str, str]:
    """Returns the special tokens of a tokenizer by name, such as ``bos_token``. Raises ``CheckpointError``."""
    named = read_tokenizer_config(folder)
    # A file has each as a string or as an object with ``content``.
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}


def added_special_tokens(folder: Path) -> dict[str, int]:
    """Returns the ids of a tokenizer's special tokens by their texts; none without a ``tokenizer.json``.

    Takes some 50 ms for 128,000 tokens.

    Raises:
        CheckpointError: the file is corrupt.
    """
    tokens = (_read_tokenizer(folder) or _TokenizerFile()).added_tokens or ()
    return {token.content: token.id for token in tokens if token.special}


def tokenizer_eos_token_id(folder: Path) -> int | None:
    """Returns the end-of-sequence token of a tokenizer; None if its configuration or its vocabulary has none.

    Takes some 50 ms for 128,000 tokens.

    Raises:
        CheckpointError: a file is corrupt.
    """
    text = named_special_tokens(folder).get("eos_token")
    if text is None or (file := _read_tokenizer(folder)) is None:
        return None
    for token in file.added_tokens or ():
        if token.content == text:
            return token.id
    try:
        vocabulary = msgspec.json.decode(file.model, type=_Model).vocab
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _corrupt(folder, error) from error
    if isinstance(vocabulary, dict):
        return vocabulary.get(text)
    return next((index for index, (token, _) in enumerate(vocabulary) if token == text), None)


def _read_tokenizer(folder: Path) -> _TokenizerFile | None:
    """Returns the ``tokenizer.json`` of a folder; None if there is none. Raises ``CheckpointError``."""
    content = read_text(folder / "tokenizer.json")
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=_TokenizerFile)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _corrupt(folder, error) from error


def _corrupt(folder: Path, error: Exception) -> CheckpointError:
    path = folder / "tokenizer.json"
    return CheckpointError(f"{path} is not a tokenizer: {error}; fetch the checkpoint again")
