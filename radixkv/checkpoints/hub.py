"""Download of checkpoints from the Hugging Face hub."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
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

FileGroup = Literal["weights", "config", "tokenizer"]

_FILES: Mapping[FileGroup, tuple[str, ...]] = MappingProxyType(
    {
        "weights": ("*.safetensors", "*.safetensors.index.json"),
        "config": (
            "config.json",
            "generation_config.json",
            "hf_quant_config.json",
            "modules.json",
            "*_Pooling/config.json",
        ),
        "tokenizer": (
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "added_tokens.json",
            "chat_template.jinja",
            "chat_template.json",
            "additional_chat_templates/*.jinja",
        ),
    }
)
_IGNORED_PATTERNS = ("*/*.safetensors", "*/*.safetensors.index.json", "consolidated*.safetensors")
"""Files to skip: subfolders contain other formats, and ``consolidated`` files contain the same weights again."""


_BYTES_BAR = "huggingface_hub.snapshot_download"
"""The client's name of the bar that counts the bytes of all files.

Older clients, such as 1.0, have none: they draw a bar for each file, and only on a terminal.
"""


def download(
    name: str,
    revision: str | None,
    *,
    file_groups: Iterable[FileGroup],
    role: str,
    cache_folder: Path | None,
    endpoint: str | None,
    show_download: Callable[[str], None],
) -> Path:
    """Downloads files of a hub repository and returns their folder. Pickled files are never downloaded.

    Cached files are not downloaded again, and are used without a network.

    Args:
        name: the repository, such as ``org/name``.
        revision: branch, tag or commit; None takes ``main``.
        file_groups: which files to download.
        role: "model" or "tokenizer", for error messages.
        cache_folder: None takes huggingface_hub's own (``HF_HOME``).
        endpoint: None takes ``HF_ENDPOINT`` or the public hub.
        show_download: gets a text with the downloaded bytes whenever there are more, from several threads; at the
            end an empty one.

    Raises:
        CheckpointError: no such repository or revision, no access, or no network and nothing cached.
    """
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            cache_dir=cache_folder,
            endpoint=endpoint,
            allow_patterns=[pattern for group in file_groups for pattern in _FILES[group]],
            ignore_patterns=list(_IGNORED_PATTERNS),
            tqdm_class=_progress_bars(show_download),
        )
    except Exception as error:  # includes errors of the HTTP library, which differs between releases of the client
        raise CheckpointError(f"{role} {name!r}: {_failure_reason(error, revision)}") from error
    show_download("")
    return Path(folder)


def _progress_bars(show: Callable[[str], None]) -> type[tqdm]:
    """Returns the class of the client's progress bars: they draw nothing and give ``show`` the downloaded bytes."""

    class ProgressBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("name") == _BYTES_BAR
            # A disabled bar, as all are without a terminal, does not count. The endless delay keeps notebooks from
            # drawing the bar when it is made.
            super().__init__(*args, **kwargs | {"disable": False, "delay": math.inf})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            super().update(n)
            if self._counts_bytes and not self.disable:
                show(f"downloaded {self.n / 1e9:.2f} of {self.total / 1e9:.2f} GB")

        def display(self, *args: object, **kwargs: object) -> None:
            pass

        def clear(self, *args: object, **kwargs: object) -> None:
            pass

    return ProgressBar


def _failure_reason(error: Exception, revision: str | None) -> str:
    if isinstance(error, GatedRepoError):
        return "the repository is gated; request access on its hub page, then set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return (
            "there is no such folder, and no such repository on the hub; "
            "check the spelling, or set HF_TOKEN if it is private"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"the repository has no revision {revision!r}; name one of its branches, tags or commits"
    if isinstance(error, HFValidationError):
        return f"the name is not a valid hub name: {_one_line(error)}"
    if isinstance(error, LocalEntryNotFoundError):
        cause = _one_line(error.__cause__ or error)
        return f"the hub does not answer and no copy is cached ({cause}); check the network, or give a folder"
    if isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code == 401:
        return "the hub refuses access; set HF_TOKEN to a token that may read this repository"
    return f"the download failed: {_one_line(error)}; try again, or give a folder"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
