"""Checkpoints on the hub."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from radixkv.errors import CheckpointError

Part = Literal["weights", "config", "tokenizer"]

_FILES: Mapping[Part, tuple[str, ...]] = MappingProxyType(
    {
        "weights": ("*.safetensors", "*.safetensors.index.json"),
        "config": ("config.json", "generation_config.json"),
        "tokenizer": (
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "added_tokens.json",
            "chat_template.jinja",
            "chat_template.json",
        ),
    }
)
_UNWANTED = ("*/*", "consolidated*.safetensors")
"""Folders hold other formats; ``consolidated`` files are the same weights a second time."""


class _TerminalProgress(tqdm):
    """A progress bar on a terminal, nothing elsewhere."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not sys.stderr.isatty():
            kwargs["disable"] = True
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]  # the client does not annotate it


def download(
    name: str,
    revision: str | None,
    *,
    parts: Iterable[Part],
    what: str,
    cache_folder: Path | None,
    endpoint: str | None,
) -> Path:
    """The folder of a hub repository's files; pickled files stay there.

    Files that were fetched before are not fetched again; without a network the cached ones are taken. Progress
    is shown on a terminal only.

    Args:
        parts: which files are wanted.
        what: what ``name`` is to the user, for messages.
        cache_folder: None takes the hub's own (``HF_HOME``).
        endpoint: None takes ``HF_ENDPOINT`` or the public hub.

    Raises:
        CheckpointError: no such repository or revision, no access, or no network and nothing cached.
    """
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            cache_dir=cache_folder,
            endpoint=endpoint,
            allow_patterns=[pattern for part in parts for pattern in _FILES[part]],
            ignore_patterns=list(_UNWANTED),
            tqdm_class=_TerminalProgress,
        )
    except Exception as error:  # also the errors of whichever HTTP library the client's release uses
        raise CheckpointError(f"{what} {name!r}: {_reason(error, revision)}") from error
    return Path(folder)


def _reason(error: Exception, revision: str | None) -> str:
    if isinstance(error, GatedRepoError):
        return "access to it has to be granted; ask on its page, then set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return (
            "there is no such folder, and no such repository on the hub; "
            "check the spelling, or set HF_TOKEN if it is private"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"it has no revision {revision!r}; name one of its branches, tags or commits"
    if isinstance(error, HFValidationError):
        return f"this is not a hub name: {_one_line(error)}"
    if isinstance(error, LocalEntryNotFoundError):
        cause = _one_line(error.__cause__ or error)
        return f"the hub gives no answer and no copy is cached ({cause}); check the network, or give a folder"
    if isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code == 401:
        return "the hub refuses access; set HF_TOKEN to a token that may read it"
    return f"the download failed: {_one_line(error)}; try again, or give a folder"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
