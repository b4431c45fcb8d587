"""The folder of a server's page files: who may use it, and where files are in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from radixkv.errors import ConfigError
from radixkv.runtime.tiers.stores.page_file import round_up_to_blocks
from radixkv.runtime.tiers.stores.page_index import IndexedPage
from radixkv.runtime.tiers.stores.page_keys import KEY_BYTES
from radixkv.runtime.tiers.stores.page_value import BLOCK_BYTES

_LOCK = "radixkv.lock"
_SUBFOLDERS = frozenset(f"{byte:02x}" for byte in range(256))
TEMPORARY_SUFFIX = ".tmp"
_TEMPORARY = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}\.[0-9]+{re.escape(TEMPORARY_SUFFIX)}")


class PageFolder:
    """A folder with mode 0700 and up to 256 subfolders, locked as long as this object is open.

    The folder is made if there is none. Temporary files of a killed process are removed.

    Args:
        path: the folder.

    Raises:
        ConfigError: the folder belongs to another user, is open to others, has other files, is in use by another
            server, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        with contextlib.ExitStack() as stack:
            try:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
                """The folder's; names of files are relative to it."""
                stack.callback(os.close, self.descriptor)
                self._check_owner()
                self._lock(stack)
                self.is_direct = self._takes_direct_io()
                """Whether the file system takes direct I/O."""
                self._remove_temporary_files()
            except OSError as error:
                raise unusable(path, error) from error
            self._open = stack.pop_all()

    def files(self) -> Iterator[IndexedPage]:
        """Yields all page files, with their modification times as ticks. Reads names and attributes only.

        Raises:
            OSError: a subfolder cannot be read.
        """
        for entry in self._entries():
            try:
                key = bytes.fromhex(entry.name)
            except ValueError:
                continue
            about = entry.stat(follow_symlinks=False)
            if len(key) == KEY_BYTES and stat.S_ISREG(about.st_mode):
                yield IndexedPage(key, round_up_to_blocks(about.st_size), about.st_mtime_ns)

    def make_subfolder(self, key: bytes) -> None:
        """Makes the subfolder of a page's file, if there is none. Raises ``OSError``."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.dirname(name_of(key)), 0o700, dir_fd=self.descriptor)

    def close(self) -> None:
        """Gives the lock back."""
        self._open.close()

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """Yields what is in the subfolders. Raises ``OSError``, also for one that is a link to another folder."""
        for name in _SUBFOLDERS.intersection(os.listdir(self.descriptor)):
            if not stat.S_ISDIR(os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, f"{name!r} in it is no folder")
            with os.scandir(self.path / name) as entries:
                yield from entries

    def _check_owner(self) -> None:
        about = os.fstat(self.descriptor)
        if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
            raise ConfigError(
                f"the cache folder {self.path} is open to other users, but pages contain prompts; it must be "
                "yours, with mode 0700"
            )

    def _lock(self, stack: contextlib.ExitStack) -> None:
        """Locks the file that marks the folder as one of page files; the stack closes it."""
        names = os.listdir(self.descriptor)
        if names and _LOCK not in names:
            raise ConfigError(
                f"the cache folder {self.path} has other files, such as {min(names)!r}; give an empty folder"
            )
        # Opening a FIFO would wait for another process.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        lock = os.open(_LOCK, flags, 0o600, dir_fd=self.descriptor)
        stack.callback(os.close, lock)
        self._check_lock(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another server uses the cache folder {self.path}; give each server a folder of its own"
            ) from None

    def _check_lock(self, lock: int) -> None:
        """Refuses a file that no server has made: a block of zeros is written to it."""
        about = os.fstat(lock)
        if (
            not stat.S_ISREG(about.st_mode)
            or os.read(lock, BLOCK_BYTES + 1).strip(b"\0")
            or about.st_size > BLOCK_BYTES
        ):
            raise ConfigError(
                f"{self.path / _LOCK} is another file than a server makes in its cache folder; give an empty folder"
            )

    def _remove_temporary_files(self) -> None:
        for entry in self._entries():
            if _TEMPORARY.fullmatch(entry.name):
                os.unlink(entry.path)

    def _takes_direct_io(self) -> bool:
        try:
            self._write_block(os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._write_block(0)
            return False
        return True

    def _write_block(self, flags: int) -> None:
        """Writes a block into the file of the lock. A full disk is no error: pages can be read from it."""
        descriptor = os.open(_LOCK, os.O_WRONLY | flags, dir_fd=self.descriptor)
        try:
            os.write(descriptor, mmap.mmap(-1, BLOCK_BYTES))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        finally:
            os.close(descriptor)


def unusable(path: Path, error: OSError) -> ConfigError:
    """Returns the error for a folder in which an operation failed at the start."""
    return ConfigError(
        f"the cache folder {path} cannot be used: {error.strerror}; give a folder that this user can write"
    )


def name_of(key: bytes) -> str:
    """Returns the name of a page's file, relative to the folder."""
    name = key.hex()
    return f"{name[:2]}/{name}"
