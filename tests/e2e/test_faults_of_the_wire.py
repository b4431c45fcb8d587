"""Foreign peers and messages on the socket between the processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from radixkv.settings.config import EngineConfig
from radixkv.wire.messages import MAX_FRAME_BYTES, WIRE_VERSION, Cancel, Drain, Hello, Start, encode
from support.failed_start import failed_start_error
from support.live import HERE, LIMIT_S, LiveServer, wait_for

OTHER_VERSION = """
import sys
from radixkv.runtime import process as main
from radixkv.runtime import assemble
assemble.WIRE_VERSION = main.WIRE_VERSION = main.WIRE_VERSION + 1
sys.exit(main.main())
"""
"""Code of a runtime with another wire version."""


@pytest.fixture
def socket_path(checked_server: LiveServer) -> Iterator[Path]:
    """The runtime's socket; checks afterwards that its folder is unchanged and the only one."""
    before = sorted(checked_server.folder.glob("radixkv-*/*"))
    (path,) = (path for path in before if path.name == "runtime.sock")
    yield path
    assert sorted(checked_server.folder.glob("radixkv-*/*")) == before
    assert list(checked_server.folder.glob("radixkv-*")) == [path.parent]


@pytest.mark.nightly
def test_garbage_and_foreign_peers_are_dropped_and_counted(checked_server: LiveServer, socket_path: Path) -> None:
    dropped = checked_server.metric("frames_dropped_total")
    frames = [b"", b"garbage", b"\x91" * 10_000, *map(encode, (Hello(WIRE_VERSION), Drain(), Cancel("x")))]
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 1000)
        stranger.connect(f"ipc://{socket_path}")
        for frame in frames:
            stranger.send(frame)
        stranger.send(b"x" * (MAX_FRAME_BYTES + 1))
        wait_for(
            lambda: checked_server.metric("frames_dropped_total") == dropped + len(frames), "they are not counted"
        )
        assert not stranger.poll(100)


@pytest.mark.nightly
def test_a_second_runtime_on_the_same_path_refuses_to_start(checked_server: LiveServer, socket_path: Path) -> None:
    start = Start(EngineConfig(), "/nowhere", str(socket_path))
    ended = subprocess.run(
        [sys.executable, "-m", "radixkv.runtime.process"],
        input=msgspec.json.encode(start) + b"\n",
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 1
    assert b"another runtime already serves" in ended.stdout
    assert socket_path.exists(), "what it found there is the first one's"


@pytest.mark.nightly
def test_a_runtime_of_another_version_is_refused(sensitive: Path, tmp_path: Path) -> None:
    script, scratch = tmp_path / "runtime.py", tmp_path / "t"
    script.write_text(OTHER_VERSION)
    scratch.mkdir()
    entry = [sys.executable, str(HERE / "watched_cli.py"), str(tmp_path / "report.json"), str(script)]
    reason = failed_start_error(scratch, str(sensitive), entry=entry)
    assert f"wire version {WIRE_VERSION + 1} and the frontend {WIRE_VERSION};" in reason
