from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path

import pytest

from stores.store_processes import AWS, FLAGS, S3, URL, running_s3, without_aws
from support.live import LiveServer, serving

Start = Callable[..., AbstractContextManager[LiveServer]]
FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == FOLDER:
            item.add_marker(pytest.mark.stores)


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """A store in S3's protocol, which servers find by their environment."""
    for name in without_aws():
        monkeypatch.delenv(name)
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "s3").mkdir()
    with running_s3(tmp_path / "s3") as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        yield store


@pytest.fixture
def start(sensitive: Path, tmp_path: Path) -> Start:
    """Starts servers, each with a folder of its own for ``errors``, with the store in ``s3`` if none is named."""
    numbers = count()

    def start_one(*flags: str, url: str = URL, model: Path = sensitive) -> AbstractContextManager[LiveServer]:
        (folder := tmp_path / f"server{next(numbers)}").mkdir()
        return serving(model, folder / "errors", *FLAGS, "--cache-url", url, *flags)

    return start_one
