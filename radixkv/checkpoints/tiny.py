"""The embedded model's folder in the user's cache."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Mapping
from pathlib import Path

import xxhash

from radixkv.checkpoints.recipe import build_files
from radixkv.errors import CheckpointError

DIGEST = "84e11c90bdbe6f6530393f3142f102c1"
"""Of the files that ``recipe`` builds; a new recipe has a new digest, and so a new folder."""

_FILE_NAMES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def embedded_folder(cache_folder: Path) -> Path:
    """The folder of the embedded model; builds it if it is not there, not whole or not intact.

    Safe against other processes that do the same at the same moment: one builds, the others wait for it, and
    a folder that is intact is never touched again.

    Raises:
        CheckpointError: the cache folder cannot be written, or the build gives other bytes than it should.

    Cost: a hash over 21 MB, some milliseconds; about a second when it has to build.
    """
    folder = cache_folder / f"tiny-{DIGEST[:16]}"
    if _is_intact(folder):
        return folder
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        with open(cache_folder / "tiny.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_intact(folder):
                _build(folder)
    except OSError as error:
        raise CheckpointError(
            f"the embedded model cannot be written into {cache_folder}: {error}; "
            "free some space or set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return folder


def _build(folder: Path) -> None:
    """Makes the folder appear whole, in place of what is there. The caller holds the lock."""
    files = build_files()
    digest = digest_of(files)
    if digest != DIGEST:
        raise CheckpointError(
            f"the embedded model was built with digest {digest} instead of {DIGEST}; "
            "reinstall radixkv, or name another model"
        )
    partial = folder.with_name(folder.name + ".partial")
    # A builder that was killed may have left either.
    for stale in (partial, folder):
        if stale.exists():
            shutil.rmtree(stale)
    partial.mkdir()
    for name, content in files.items():
        (partial / name).write_bytes(content)
    partial.rename(folder)


def _is_intact(folder: Path) -> bool:
    try:
        return digest_of({name: (folder / name).read_bytes() for name in _FILE_NAMES}) == DIGEST
    except OSError:
        return False


def digest_of(files: Mapping[str, bytes]) -> str:
    """A digest over names and contents, whatever the mapping's order."""
    digest = xxhash.xxh3_128()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
