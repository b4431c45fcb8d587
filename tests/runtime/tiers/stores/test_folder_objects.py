"""A folder that servers share: whole objects or none, and no folder that others can read."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from radixkv.errors import ConfigError
from radixkv.runtime.tiers.stores.folder_objects import FolderObjects
from radixkv.runtime.tiers.stores.object_store import ObjectStoreError

NAME = "0123456789abcdef"


@pytest.fixture
def objects(tmp_path: Path) -> FolderObjects:
    return FolderObjects(f"file://{tmp_path}/a%20folder/kv")


def test_what_one_server_puts_another_one_gets(objects: FolderObjects, tmp_path: Path) -> None:
    other = FolderObjects(f"file://{tmp_path}/a folder/kv")

    async def use() -> None:
        assert await objects.have([NAME]) == [False]
        assert await other.get(NAME) is None
        assert await objects.put(NAME, memoryview(b"page"))
        assert await other.have(["absent", NAME]) == [False, True]
        value = await other.get(NAME)
        assert value is not None
        assert bytes(value) == b"page"
        assert await other.put(NAME, memoryview(b"another"))
        assert bytes(await objects.get(NAME) or b"") == b"another"
        assert await other.delete(NAME)
        assert await other.delete(NAME)
        assert await objects.get(NAME) is None

    asyncio.run(use())
    folder = tmp_path / "a folder" / "kv"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not list((folder / NAME[:2]).iterdir())


@pytest.mark.parametrize(("code", "is_full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)])
def test_a_write_that_fails_leaves_nothing(
    objects: FolderObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_full: bool
) -> None:
    def fail(self: Path, target: Path) -> Path:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "rename", fail)
    if is_full:
        assert not asyncio.run(objects.put(NAME, memoryview(b"page")))
    else:
        with pytest.raises(ObjectStoreError, match=os.strerror(code)):
            asyncio.run(objects.put(NAME, memoryview(b"page")))
    assert asyncio.run(objects.have([NAME])) == [False]
    assert not list((tmp_path / "a folder" / "kv" / NAME[:2]).iterdir())


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        os.mkdir,
        lambda path: path.symlink_to("/etc/passwd"),
        lambda path: path.symlink_to(path),
    ],
)
def test_what_is_no_file_is_absent(objects: FolderObjects, tmp_path: Path, make: Callable[[Path], object]) -> None:
    """An error would have the whole store count as away."""
    folder = tmp_path / "a folder" / "kv" / NAME[:2]
    folder.mkdir()
    make(folder / NAME)
    assert asyncio.run(objects.get(NAME)) is None
    assert asyncio.run(objects.have([NAME])) == [False]


def test_what_cannot_be_read_is_absent(objects: FolderObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(objects.put(NAME, memoryview(b"page")))

    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    assert asyncio.run(objects.get(NAME)) is None


def test_a_file_in_place_of_a_subfolder_hides_its_objects(objects: FolderObjects, tmp_path: Path) -> None:
    (tmp_path / "a folder" / "kv" / NAME[:2]).touch()
    assert asyncio.run(objects.get(NAME)) is None
    assert asyncio.run(objects.have([NAME])) == [False]


def test_a_folder_without_room_for_subfolders_is_full(
    objects: FolderObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, *args: object, **settings: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", fail)
    assert not asyncio.run(objects.put(NAME, memoryview(b"page")))


def test_a_folder_that_is_removed_is_made_again(objects: FolderObjects, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "a folder")
    assert asyncio.run(objects.put(NAME, memoryview(b"page")))
    assert bytes(asyncio.run(objects.get(NAME)) or b"") == b"page"
    folder = tmp_path / "a folder" / "kv"
    assert folder.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(folder)
    folder.mkdir(mode=0o755)
    (tmp_path / "elsewhere").mkdir()
    folder.rmdir()
    folder.symlink_to(tmp_path / "elsewhere" / "gone")
    with pytest.raises(ObjectStoreError):
        asyncio.run(objects.put(NAME, memoryview(b"page")))


def test_what_is_read_or_found_is_younger_than_what_is_not(objects: FolderObjects, tmp_path: Path) -> None:
    """So a job that removes old files removes what is unused."""
    names = ["00read", "00found", "00unused"]
    paths = [tmp_path / "a folder" / "kv" / "00" / name for name in names]
    for name, path in zip(names, paths, strict=True):
        asyncio.run(objects.put(name, memoryview(b"page")))
        os.utime(path, (1000, 1000))
    asyncio.run(objects.get("00read"))
    assert asyncio.run(objects.have(["00found"])) == [True]
    assert [path.stat().st_mtime == 1000 for path in paths] == [False, False, True]


def test_folders_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="open to other users"):
        FolderObjects(f"file://{tmp_path}/open")
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "disk" / "radixkv.lock").touch()
    with pytest.raises(ConfigError, match="disk tier"):
        FolderObjects(f"file://{tmp_path}/disk")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="symbolic link"):
        FolderObjects(f"file://{tmp_path}/link")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        FolderObjects(f"file://{tmp_path}/file")
