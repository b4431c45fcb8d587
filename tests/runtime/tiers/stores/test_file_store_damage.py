"""Files that are not the pages that their names promise, disks that fail, and folders that cannot be used."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from radixkv.errors import ConfigError
from radixkv.runtime.tiers.stores import file_store as file_store_module
from radixkv.runtime.tiers.stores.file_store import MAX_WRITE_FAILURES, FileStore
from support.page_files import (
    PAGE_TOKEN_BYTES,
    buffers,
    file_of,
    file_store,
    keys_of,
    load_run,
    page_files,
    page_of,
    store_run,
    tokens_of,
    wait,
)

RUN = range(6)
DAMAGED = 3
"""The page of the run that each test damages."""


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda contents: contents[:at] + bytes([contents[at] ^ 1]) + contents[at + 1 :]


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda contents: b"",
    "a byte": lambda contents: contents[:1],
    "the header only": lambda contents: contents[:4096],
    "without the last byte": lambda contents: contents[:-1],
    "zeros": lambda contents: bytes(len(contents)),
    "page of zeros": lambda contents: contents[:4096].ljust(len(contents), b"\0"),
    "of another program": lambda contents: b"\x7fELF".ljust(len(contents), b"x"),
    "magic": flipped(0),
    "format version": flipped(8),
    "token size": flipped(12),
    "page size": flipped(16),
    "key": flipped(24),
    "key of the parent": flipped(56),
    "tokens": flipped(88),
    "padding": flipped(2000),
    "checksum": flipped(4095),
    "first byte of the page": flipped(4096),
    "last byte of the page": flipped(8191),
}


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_damaged_file_is_a_miss_with_one_warning_and_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str, is_restarted: bool
) -> None:
    path = tmp_path / "pages"
    damaged = file_of(path, RUN[: DAMAGED + 1])
    with file_store(path) as store:
        assert store_run(store, RUN) == len(RUN)
        if not is_restarted:
            damaged.write_bytes(CHANGES[change](damaged.read_bytes()))
            check_miss(store, damaged, caplog)
            return
    damaged.write_bytes(CHANGES[change](damaged.read_bytes()))
    with file_store(path) as store:
        check_miss(store, damaged, caplog)


def check_miss(store: FileStore, damaged: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert store.run(keys_of(RUN)) == len(RUN), "contents are not read until they are wanted"
    assert load_run(store, RUN) == [page_of(key, 4096) for key in keys_of(RUN)[:DAMAGED]]
    assert not damaged.exists()
    (record,) = caplog.records
    assert damaged.name in record.getMessage()
    assert store.run(keys_of(RUN)) == DAMAGED
    assert store.counts.n_lost == 1
    n_before = store.counts.n_written
    assert store_run(store, RUN) == len(RUN)
    assert store.counts.n_written == n_before + 1
    assert load_run(store, RUN) == [page_of(key, 4096) for key in keys_of(RUN)]
    assert len(caplog.records) == 1


def test_a_file_under_another_pages_name_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pages"
    with file_store(path) as store:
        store_run(store, RUN)
        shutil.copyfile(file_of(path, RUN[:1]), file_of(path, RUN[:2]))
        assert len(load_run(store, RUN)) == 1
        assert len(caplog.records) == 1


def test_other_tokens_under_the_same_key_are_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tokens are compared: a digest alone never makes a page shared."""
    with file_store(tmp_path / "pages") as store:
        store_run(store, RUN)
        other = tokens_of([*RUN[:-1], 77])
        assert wait(store, store.load(keys_of(RUN), other, buffers(len(RUN), 4096))).n_pages == len(RUN) - 1
        assert len(caplog.records) == 1


def test_a_page_of_another_size_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for other_bytes in (2048, 8192):
        with file_store(tmp_path / "pages", page_bytes=other_bytes) as store:
            store_run(store, RUN[:1])
        with file_store(tmp_path / "pages") as store:
            assert load_run(store, RUN[:1]) == []
    assert len(caplog.records) == 2


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    with file_store(path) as store:
        store_run(store, RUN[:1])
        file = file_of(path, RUN[:1])
        target = file.rename(tmp_path / "elsewhere")
        file.symlink_to(target)
        assert load_run(store, RUN[:1]) == []
        assert target.exists()
        assert not file.is_symlink()


def test_many_damaged_files_give_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pages"
    with file_store(path) as store:
        store_run(store, range(50))
        for file in page_files(path):
            file.write_bytes(b"")
        assert load_run(store, range(50)) == []
        assert store.n_pages == 0
        assert len(caplog.records) == 1


def test_a_folder_that_is_removed_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pages"
    with file_store(path) as store:
        store_run(store, RUN)
        shutil.rmtree(path)
        assert load_run(store, RUN) == []
        assert [store_run(store, [page]) for page in range(9)] == [0] * 9
        assert len(caplog.records) == 2, "one for the loads, one for the stores"
        assert not path.exists()


def test_a_subfolder_that_is_removed_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    with file_store(path) as store:
        store_run(store, RUN[:1])
        shutil.rmtree(file_of(path, RUN[:1]).parent)
        assert load_run(store, RUN[:1]) == []
        assert store_run(store, RUN[:1]) == 1


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, function: str, code: int) -> Iterator[None]:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        yield


@pytest.mark.parametrize("function", ["writev", "rename", "utime"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_writes_that_fail_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, function: str, code: int
) -> None:
    path = tmp_path / "pages"
    with file_store(path) as store:
        store_run(store, [8])
        with failing(monkeypatch, function, code):
            assert store_run(store, [9]) == 0
        assert store_run(store, [9]) == 1, "one failure does not pause"
        with failing(monkeypatch, function, code):
            assert [store_run(store, [page]) for page in range(MAX_WRITE_FAILURES)] == [0] * MAX_WRITE_FAILURES
        (record,) = caplog.records
        assert os.strerror(code) in record.getMessage()
        assert store_run(store, range(3)) == 0, "paused"
        assert len(load_run(store, [8])) == 1, "reads go on"
        assert len(page_files(path)) == 2, "no temporary files are left"
        assert store.n_bytes == 2 * 8192
        monkeypatch.setattr(file_store_module.time, "monotonic", lambda: float("inf"))
        assert store_run(store, range(3)) == 3, "after the pause"


def test_reads_that_fail_are_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with file_store(tmp_path / "pages") as store:
        store_run(store, RUN)
        with failing(monkeypatch, "readv", errno.ENOMEM):
            assert load_run(store, RUN) == []
        assert len(load_run(store, RUN)) == len(RUN), "the next attempt may succeed"
        assert store.counts.n_lost == 0
        with failing(monkeypatch, "readv", errno.EIO):
            assert load_run(store, RUN) == []
        assert store.run(keys_of(RUN)) == 0, "a bad block stays bad"
        assert store.counts.n_lost == len(RUN)
        assert len(caplog.records) == 1


def test_an_unforeseen_error_finishes_the_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("a bug")

    with file_store(tmp_path / "pages") as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", fail)
            assert store_run(store, RUN) == 0
        assert store_run(store, RUN) == len(RUN)


def test_a_limit_of_the_file_size(tmp_path: Path) -> None:
    """A real short write: the kernel writes up to the limit, as on a disk that becomes full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "pages"
    with file_store(path, page_bytes=2**17) as store:
        store_run(store, [1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
        try:
            assert store_run(store, [2]) == 0
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len(page_files(path)) == 1
        assert store_run(store, [2]) == 1


def test_a_full_disk_at_the_start_leaves_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pages"
    with file_store(path) as store:
        store_run(store, RUN)
    with failing(monkeypatch, "write", errno.ENOSPC), file_store(path) as store:
        assert len(load_run(store, RUN)) == len(RUN)


def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse_direct(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse_direct)
    with file_store(tmp_path / "pages") as store:
        assert store_run(store, RUN) == len(load_run(store, RUN)) == len(RUN)


def refused(path: Path, **settings: int) -> str:
    """Returns the error of a store that cannot be opened; the folder stays free."""
    with pytest.raises(ConfigError) as error, file_store(path, **settings):
        pass
    assert str(path) in str(error.value) or settings
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777])
def test_a_folder_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "pages"
    path.mkdir()
    path.chmod(mode)
    assert "0700" in refused(path)
    path.chmod(0o700)
    with file_store(path):
        pass


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with file_store(tmp_path / "pages"):
        pass
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert "0700" in refused(tmp_path / "pages")


def test_new_folders_and_files_are_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "new" / "pages"
    mask = os.umask(0)
    try:
        with file_store(path) as store:
            store_run(store, RUN)
    finally:
        os.umask(mask)
    assert not any(file.stat().st_mode & 0o077 for file in [path, *path.rglob("*")])


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "home"
    path.mkdir(mode=0o700)
    (path / "letter.tmp").write_text("dear")
    assert "letter.tmp" in refused(path)
    assert [file.name for file in path.iterdir()] == ["letter.tmp"]


@pytest.mark.parametrize("kind", ["letter", "large", "fifo", "link", "folder"])
def test_another_file_in_the_place_of_the_lock_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "pages"
    path.mkdir(mode=0o700)
    lock, elsewhere = path / "radixkv.lock", tmp_path / "elsewhere"
    contents = {"letter": b"dear", "large": bytes(1 << 20)}.get(kind)
    if contents is not None:
        lock.write_bytes(contents)
    elif kind == "fifo":
        os.mkfifo(lock)
    elif kind == "link":
        lock.symlink_to(elsewhere)
    else:
        lock.mkdir()
    before = lock.lstat()
    assert str(path) in refused(path)
    assert (lock.lstat().st_ino, lock.lstat().st_size) == (before.st_ino, before.st_size)
    assert contents is None or lock.read_bytes() == contents
    assert not elsewhere.exists()


def test_a_subfolder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "pages", tmp_path / "elsewhere"
    with file_store(path):
        pass
    elsewhere.mkdir()
    (elsewhere / f"{'00' * 64}.17.tmp").write_text("mine")
    (path / "00").symlink_to(elsewhere)
    assert "'00'" in refused(path)
    assert len(list(elsewhere.iterdir())) == 1


def test_other_files_in_a_subfolder_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    with file_store(path) as store:
        store_run(store, RUN)
    subfolder = file_of(path, RUN[:1]).parent
    (subfolder / "notes.txt").write_text("notes")
    (subfolder / "notes.tmp").write_text("more notes")
    (subfolder / ("00" * 64)).mkdir()
    (subfolder / f"{'00' * 64}.17.tmp").write_text("left by a killed process")
    with file_store(path) as store:
        assert store.n_pages == len(RUN)
        wait(store, store.clear())
    assert sorted(file.name for file in subfolder.iterdir()) == ["00" * 64, "notes.tmp", "notes.txt"]


@pytest.mark.parametrize("place", ["a file", "below a file", "/proc/radixkv", "too long"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    paths = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "x",
        "too long": tmp_path / ("x" * 300),
    }
    refused(paths.get(place, Path(place)))


@pytest.mark.parametrize("function", ["write", "scandir", "listdir"])
def test_a_folder_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    path = tmp_path / "pages"
    with file_store(path) as store:
        store_run(store, RUN)
    with failing(monkeypatch, function, errno.EROFS):
        assert os.strerror(errno.EROFS) in refused(path)
    with file_store(path) as store:
        assert len(load_run(store, RUN)) == len(RUN), "the error has released the folder"


def test_a_bound_below_a_page_is_refused(tmp_path: Path) -> None:
    assert "8191" in refused(tmp_path / "pages", max_bytes=8191)
    assert not (tmp_path / "pages").exists()


def test_a_second_server_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    code = (
        "import sys, time; from pathlib import Path;"
        "from radixkv.runtime.tiers.stores.file_store import FileStore;"
        f"FileStore(Path(sys.argv[1]), page_bytes=4096, page_token_bytes={PAGE_TOKEN_BYTES}, max_bytes=10**6);"
        "print('open', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout.readline() == b"open\n"
            assert "another server" in refused(path)
        finally:
            server.send_signal(signal.SIGKILL)
    with file_store(path) as store:
        assert store_run(store, RUN) == len(RUN)


def test_warnings_name_how_many_were_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    path = tmp_path / "pages"
    with file_store(path) as store:
        store_run(store, range(10))
        for file in page_files(path):
            file.write_bytes(b"")
        load_run(store, range(9))
        monkeypatch.setattr(file_store_module.time, "monotonic", lambda: 1e12)
        load_run(store, range(10))
        assert ["8 more" in record.getMessage() for record in caplog.records] == [False, True]
