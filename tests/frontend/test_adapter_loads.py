"""Replicas have the same adapters: one that is down gets them later, and what they do not agree on is unloaded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from radixkv.errors import InvalidRequest, RequestError, RuntimeDied
from radixkv.frontend.adapter_loads import AdapterLoads
from radixkv.frontend.http.errors import ModelNotFound
from radixkv.frontend.served_model import ServedModel
from radixkv.wire.adapter_messages import ServedAdapter


@dataclass
class FakeRuntime:
    """Loads folders whose files are a text; another digest is another text."""

    error: RequestError | None = None
    adapters: dict[str, ServedAdapter] = field(default_factory=dict)
    digest: str | None = None
    """What it reads, whatever the file has."""
    n_resumed: int = 0

    async def load_adapter(
        self, name: str, path: str, *, in_place: bool, is_restarted: bool = False
    ) -> ServedAdapter:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        if name in self.adapters and not in_place:
            raise InvalidRequest("is loaded already")
        text = (Path(path) / "adapter_config.json").read_text()
        self.adapters[name] = ServedAdapter(name, path, self.digest or text)
        return self.adapters[name]

    async def unload_adapter(self, name: str, *, is_restarted: bool = False) -> None:
        if self.error is not None:
            raise self.error
        if self.adapters.pop(name, None) is None:
            raise InvalidRequest("no such adapter")

    def resume(self) -> None:
        self.n_resumed += 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("sql", "law"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(name)
    return tmp_path


def opened(model: ServedModel, folder: Path, *runtimes: FakeRuntime) -> tuple[AdapterLoads, ServedModel]:
    served = replace(model)
    return AdapterLoads(runtimes, served, folder=folder, are_served=True), served


def test_all_replicas_load_and_unload(served_model: ServedModel, folder: Path) -> None:
    runtimes = FakeRuntime(), FakeRuntime()
    loads, served = opened(served_model, folder, *runtimes)

    async def run() -> None:
        await loads.load("a", "sql", in_place=False)
        assert served.named("a").adapter == "sql"
        assert [one.adapters["a"].digest for one in runtimes] == ["sql", "sql"]
        await loads.load("a", "law", in_place=True)
        assert served.named("a").adapter == "law"
        assert served.adapter_names == {"sql": "a", "law": "a"}, "requests that run have the other one yet"
        await loads.unload("a")
        with pytest.raises(ModelNotFound, match="no adapter 'a' is loaded; .*loaded: none"):
            await loads.unload("a")

    asyncio.run(run())
    assert [one.adapters for one in runtimes] == [{}, {}]
    with pytest.raises(ModelNotFound):
        served.named("a")


def test_a_replica_that_is_down_gets_what_the_server_has_by_then(served_model: ServedModel, folder: Path) -> None:
    up, down = FakeRuntime(), FakeRuntime(RuntimeDied("it is gone"))
    loads, served = opened(served_model, folder, up, down)

    async def run() -> None:
        await loads.load("a", "sql", in_place=False)
        await loads.load("b", "law", in_place=False)
        (folder / "law" / "adapter_config.json").write_text("other")
        down.error = None
        await asyncio.gather(loads.resume(down), loads.load("c", "sql", in_place=False))

    asyncio.run(run())
    assert down.n_resumed == 1
    assert up.adapters == down.adapters
    assert sorted(up.adapters) == sorted(served.adapted) == ["a", "c"], "the files of b have changed"


def test_what_replicas_do_not_agree_on_is_unloaded(served_model: ServedModel, folder: Path) -> None:
    runtimes = FakeRuntime(), FakeRuntime()
    loads, served = opened(served_model, folder, *runtimes)

    async def run() -> None:
        await loads.load("a", "sql", in_place=False)
        runtimes[1].digest = "changed"
        with pytest.raises(InvalidRequest, match="have changed while they were read"):
            await loads.load("a", "law", in_place=True)

    asyncio.run(run())
    assert [one.adapters for one in runtimes] == [{}, {}]
    assert not served.adapted


def test_a_load_that_one_replica_refuses_leaves_none(served_model: ServedModel, folder: Path) -> None:
    runtimes = FakeRuntime(), FakeRuntime(InvalidRequest("cannot be read"))
    loads, served = opened(served_model, folder, *runtimes)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        asyncio.run(loads.load("a", "sql", in_place=False))
    assert runtimes[0].adapters == {}
    assert not served.adapted


def test_a_load_in_place_that_all_refuse_leaves_the_one_before(served_model: ServedModel, folder: Path) -> None:
    runtimes = FakeRuntime(), FakeRuntime()
    loads, served = opened(served_model, folder, *runtimes)

    async def run() -> None:
        await loads.load("a", "sql", in_place=False)
        for runtime in runtimes:
            runtime.error = InvalidRequest("cannot be read")
        with pytest.raises(InvalidRequest, match="cannot be read"):
            await loads.load("a", "law", in_place=True)

    asyncio.run(run())
    assert served.named("a").adapter == "sql"
