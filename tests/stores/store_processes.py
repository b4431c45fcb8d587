"""Stores in processes of their own, which a test can stop, kill and start again, and servers that use them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.live import LIMIT_S, LiveServer, wait_for

BUCKET = "kv-pages"
URL = f"s3://{BUCKET}/tests"
FLAGS = ("--host-memory", "64MiB", "--load-policy", "always", "--max-total-tokens", "1024", "--max-num-seqs", "8")
STORY = "A farmer has 12 hens, and each of them lays 5 eggs a week. How many eggs does he get in a month? "
ANIMALS = ("hens", "ducks", "geese", "quails", "swans", "emus", "pigeons")
PROMPTS = [f"{animal}! {STORY.replace('hens', animal) * 3}" for animal in ANIMALS]
AWS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def ask(server: LiveServer, prompt: str | Sequence[int], **body: object) -> tuple[list[int], dict[str, Any]]:
    """Returns an answer's tokens, and where the prompt's cached tokens came from."""
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **body}
    reply: Any = server.complete(prompt=prompt, **body)
    return reply["choices"][0]["token_ids"], reply["usage"]["prompt_tokens_details"]["cached_tokens_details"]


def wait_until_written(server: LiveServer, n_pages: float = 0) -> None:
    """Waits until more than ``n_pages`` were written, and all that the host tier has."""

    def is_written() -> bool:
        n_written, n_stored = server.metrics("store_pages_written_total", "host_pages_stored_total")
        return n_written > n_pages and n_written == n_stored

    wait_for(is_written, "pages are not written")


class Process:
    """A process that listens on a port."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self._command = command
        self._port = port
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_for(self._listens, f"nothing listens: {self._log.read_text()[-2000:]}")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=LIMIT_S)

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
            return True
        return False


class S3(Process):
    """A moto server, whose buckets do not outlive it."""

    def __init__(self, log: Path) -> None:
        port = free_port()
        self.endpoint = f"http://127.0.0.1:{port}"
        super().__init__([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port, log)

    def start(self) -> None:
        super().start()
        self.client.create_bucket(Bucket=BUCKET)

    @property
    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def keys(self) -> list[str]:
        """Returns the keys of all pages."""
        listed = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return [each["Key"] for each in listed if "trial" not in each["Key"]]

    def pages(self) -> dict[str, bytes]:
        """Returns all pages by key."""
        return {key: self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in self.keys()}

    def put(self, key: str, value: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=value)


class Mooncake:
    """A Mooncake master, and a client that gives it memory."""

    def __init__(self, folder: Path, n_megabytes: int = 128) -> None:
        import mooncake

        programs = Path(mooncake.__path__[0])
        self._folder = folder
        self._n_megabytes = n_megabytes
        self.port = free_port()
        master = [str(programs / "mooncake_master"), "-rpc_port", str(self.port), "-metrics_port", "0"]
        self.master = Process(master, self.port, folder / "master.log")
        self.memory: subprocess.Popen[bytes] | None = None
        if n_megabytes:
            self.add_memory()

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}/tests"

    def add_memory(self) -> None:
        """Starts the client, of at least 16 MB."""
        code = (
            "import sys, threading; from mooncake.store import MooncakeDistributedStore as Store\n"
            "store, size = Store(), int(sys.argv[2]) << 20\n"
            "args = '127.0.0.1', 'P2PHANDSHAKE', size, 16 << 20, 'tcp', '', f'127.0.0.1:{sys.argv[1]}'\n"
            "assert store.setup(*args) == 0\n"
            "print('ready', flush=True)\n"
            "threading.Event().wait()"
        )
        command = [sys.executable, "-c", code, str(self.port), str(self._n_megabytes)]
        with (self._folder / "memory.log").open("a") as log:
            self.memory = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.memory.stdout is not None
        assert self.memory.stdout.readline() == b"ready\n", (self._folder / "memory.log").read_text()[-2000:]

    def kill(self) -> None:
        self.master.kill()
        if self.memory is not None:
            self.memory.kill()
            self.memory.wait(timeout=LIMIT_S)
            self.memory.stdout.close()


@contextlib.contextmanager
def running_s3(folder: Path) -> Iterator[S3]:
    store = S3(folder / "moto.log")
    try:
        yield store
    finally:
        store.kill()


@contextlib.contextmanager
def running_mooncake(folder: Path, n_megabytes: int = 128) -> Iterator[Mooncake]:
    store = Mooncake(folder, n_megabytes)
    try:
        yield store
    finally:
        store.kill()


def without_aws() -> list[str]:
    """Names of the variables that would lead to another store."""
    return [name for name in os.environ if name.startswith("AWS_")]
