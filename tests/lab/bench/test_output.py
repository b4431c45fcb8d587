"""Result files have whole lines, also when the disk is full."""

import resource
from contextlib import contextmanager
from pathlib import Path

import pytest

from radixkv.errors import ConfigError
from radixkv.lab.bench.output import append_lines
from radixkv.lab.bench.report.html_page import Section, write_page


@contextmanager
def files_of_at_most(n_bytes):
    """Context that limits the size of files; Python ignores the signal of larger writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_that_does_not_fit_on_the_disk_is_not_written(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_lines(path, b'{"a": 1}\n')
    with (
        files_of_at_most(20),
        pytest.raises(ConfigError, match=r"cannot write --output-file .*lines\.jsonl: File too"),
    ):
        append_lines(path, b'{"b": "123456789012345678901234567890"}\n')
    assert path.read_bytes() == b'{"a": 1}\n'
    append_lines(path, b'{"c": 3}\n')
    assert path.read_bytes() == b'{"a": 1}\n{"c": 3}\n'


def test_a_page_that_does_not_fit_on_the_disk_keeps_the_earlier_one(tmp_path):
    path = tmp_path / "index.html"
    write_page(path, "first", [Section("one")])
    before = path.read_bytes()
    with (
        files_of_at_most(len(before) // 2),
        pytest.raises(ConfigError, match=r"cannot write .*index\.html: File too"),
    ):
        write_page(path, "second", [Section("two")])
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["index.html"]


def test_devices_can_be_written_to(capfd):
    append_lines(Path("/dev/stdout"), b"{}\n")
    assert capfd.readouterr().out == "{}\n"
    with pytest.raises(ConfigError, match="No space left on device"):
        append_lines(Path("/dev/full"), b"{}\n")
