"""A folder that servers share: whole objects or none, and no folder that others can read."""

from __future__ import annotations

import asyncio
import errno
import os
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


def test_what_is_no_file_is_an_error(objects: FolderObjects, tmp_path: Path) -> None:
    folder = tmp_path / "a folder" / "kv" / NAME[:2]
    folder.mkdir()
    os.mkfifo(folder / NAME)
    with pytest.raises(ObjectStoreError):
        asyncio.run(objects.get(NAME))
    (folder / NAME).unlink()
    (folder / NAME).symlink_to("/etc/passwd")
    with pytest.raises(ObjectStoreError):
        asyncio.run(objects.get(NAME))


def test_folders_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="open to other users"):
        FolderObjects(f"file://{tmp_path}/open")
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "disk" / "radixkv.lock").touch()
    with pytest.raises(ConfigError, match="disk tier"):
        FolderObjects(f"file://{tmp_path}/disk")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        FolderObjects(f"file://{tmp_path}/file")
