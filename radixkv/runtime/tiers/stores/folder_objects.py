"""Objects in a folder that servers share: of one machine, or on a file system that several machines mount."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from radixkv.errors import ConfigError, shortened
from radixkv.runtime.tiers.stores.blocking_calls import CallThreads
from radixkv.runtime.tiers.stores.object_store import ObjectStoreError

_N_PARALLEL = 8
_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
_IS_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.ENXIO)
"""Errors of names that are there, but are no file of this user."""
_TRIAL_NAME = "radixkv-trial"
"""An object that is written when a folder is opened, to see whether that works."""
_LOCK_OF_A_DISK_TIER = "radixkv.lock"

_T = TypeVar("_T")


class FolderObjects:
    """An ``ObjectStore`` in a folder, which is made if there is none.

    An object is a file in one of up to 256 subfolders. It is written under another name first, so that no reader
    sees a part of it. The time of its last change is that of its last use: when it was written, read or found. So
    another process may remove what was not used for long. What is no file, or cannot be read, counts as absent.

    Args:
        url: ``file:///FOLDER``.

    Raises:
        ConfigError: the folder is a symbolic link, belongs to another user, is open to others, belongs to a disk
            tier, or an object cannot be written and read in it.
    """

    n_parallel = _N_PARALLEL

    def __init__(self, url: str) -> None:
        self._folder = Path(unquote(urlsplit(url).path))
        self._threads = CallThreads("folder-call")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_folder(url)
            self._put(_TRIAL_NAME, memoryview(b"radixkv"))
            self._get(_TRIAL_NAME)
        except OSError as error:
            raise ConfigError(
                f"the shared cache {shortened(url)} cannot be used: {error.strerror}; give a folder that this user "
                "can write"
            ) from error

    async def have(self, names: Sequence[str]) -> list[bool]:
        """See ``ObjectStore``."""
        return await self._call(lambda: [self._find(self._path(name)) for name in names])

    async def get(self, name: str) -> memoryview | None:
        """See ``ObjectStore``."""
        return await self._call(partial(self._get, name))

    async def put(self, name: str, value: memoryview) -> bool:
        """See ``ObjectStore``."""
        return await self._call(partial(self._put, name, value))

    async def delete(self, name: str) -> bool:
        """See ``ObjectStore``."""
        await self._call(lambda: self._path(name).unlink(missing_ok=True))
        return True

    def close(self) -> None:
        """See ``ObjectStore``."""

    async def _call(self, function: Callable[[], _T]) -> _T:
        """Awaits a call of the file system, which blocks while a disk or a file server hangs."""
        try:
            return await self._threads.run(function)
        except OSError as error:
            raise ObjectStoreError(error.strerror or str(error)) from error

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name

    def _find(self, path: Path) -> bool:
        """Returns whether a file is there, whose last use this is then."""
        try:
            is_file = stat.S_ISREG(path.lstat().st_mode)
            if is_file:
                os.utime(path, follow_symlinks=False)
        except OSError as error:
            if error.errno in _IS_ABSENT:
                return False
            raise
        return is_file

    def _get(self, name: str) -> memoryview | None:
        try:
            # Opening a FIFO would wait for another process.
            descriptor = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in _IS_ABSENT:
                return None
            raise
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            os.utime(descriptor)
            with open(descriptor, "rb", buffering=0, closefd=False) as file:
                return memoryview(file.readall())
        finally:
            os.close(descriptor)

    def _put(self, name: str, value: memoryview) -> bool:
        try:
            try:
                self._write(name, value)
            except FileNotFoundError:  # whoever cleans up has removed the folder
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if not self._is_own():
                    raise
                self._write(name, value)
        except OSError as error:
            if error.errno in _IS_FULL:
                return False
            raise
        return True

    def _write(self, name: str, value: memoryview) -> None:
        path = self._path(name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part = path.with_name(f"{name}.{uuid4().hex}.tmp")
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
                n_written = 0
                while n_written < value.nbytes:
                    n_written += file.write(value[n_written:])
            part.rename(path)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def _is_own(self) -> bool:
        about = self._folder.lstat()
        return about.st_uid == os.getuid() and not stat.S_IMODE(about.st_mode) & 0o077

    def _check_folder(self, url: str) -> None:
        if self._folder.is_symlink():
            raise ConfigError(
                f"the folder of the shared cache {shortened(url)} is a symbolic link, which may lead elsewhere "
                "tomorrow; give the folder itself"
            )
        if not self._is_own():
            raise ConfigError(
                f"the folder of the shared cache {shortened(url)} is open to other users, but pages contain "
                "prompts; it must be yours, with mode 0700"
            )
        if (self._folder / _LOCK_OF_A_DISK_TIER).exists():
            raise ConfigError(
                f"the folder of the shared cache {shortened(url)} is that of a disk tier (--cache-dir), which "
                "belongs to one server; give another folder"
            )
