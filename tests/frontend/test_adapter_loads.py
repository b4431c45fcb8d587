"""Replicas have the same adapters: one that is down gets them later, and what they do not agree on is unloaded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from radixkv.errors import InvalidRequest, ModelNotFound, RequestError, RuntimeDied
from radixkv.frontend import adapter_loads
from radixkv.frontend.adapter_loads import AdapterLoads
from radixkv.frontend.http.errors import RuntimeSilent
from radixkv.frontend.served_model import ServedModel
from radixkv.wire.adapter_messages import ServedAdapter


@dataclass
class FakeRuntime:
    """Loads folders whose files are a text; another digest is another text."""

    error: RequestError | None = None
    """Why it loads nothing."""
    n_errors: int | None = None
    """How often it is the reason; None: always."""
    is_down: bool = False
    loads: dict[str, ServedAdapter] = field(default_factory=dict)
    """Those that requests may have, by their ids."""
    named: set[str] = field(default_factory=set)
    """Of these, those that count."""
    digest: str | None = None
    """What it reads, whatever the file has."""
    may_load: asyncio.Event = field(default_factory=asyncio.Event)
    n_resumed: int = 0

    def __post_init__(self) -> None:
        self.may_load.set()

    async def load_adapter(self, load: str, name: str, path: str, *, is_restarted: bool = False) -> ServedAdapter:
        await asyncio.sleep(0)
        if self.is_down:
            raise RuntimeDied("it is gone")
        if isinstance(self.error, InvalidRequest) and self.n_errors != 0:
            self.n_errors = None if self.n_errors is None else self.n_errors - 1
            raise self.error
        assert load not in self.loads
        text = (Path(path) / "adapter_config.json").read_text()
        adapter = self.loads[load] = ServedAdapter(name, path, self.digest or text)
        self.named.add(load)
        await self.may_load.wait()
        if self.error is not None and self.n_errors is None:  # it has not answered in time, and goes on
            raise self.error
        return adapter

    def unload_adapter(self, load: str, *, is_released: bool, is_restarted: bool = False) -> None:
        self.named.discard(load)
        if is_released and not self.is_down:
            self.loads.pop(load, None)

    def resume(self) -> None:
        self.n_resumed += 1

    @property
    def names(self) -> dict[str, str]:
        """The digests of the adapters that count, by their names."""
        return {self.loads[load].name: self.loads[load].digest for load in self.named}

    @property
    def digests(self) -> set[str]:
        """Those that requests may have."""
        return {adapter.digest for adapter in self.loads.values()}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_loads, "_RETRY_PAUSES_S", (0.0, 0.0))


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
        assert [one.names for one in runtimes] == [{"a": "sql"}] * 2
        with pytest.raises(InvalidRequest, match="'a' is loaded already; .*load_inplace"):
            await loads.load("a", "law", in_place=False)
        await loads.load("a", "law", in_place=True)
        assert served.named("a").adapter == "law"
        assert [one.names for one in runtimes] == [{"a": "law"}] * 2
        await loads.unload("a")
        with pytest.raises(ModelNotFound, match="no adapter 'a' is loaded; .*loaded: none"):
            await loads.unload("a")

    asyncio.run(run())
    assert [one.loads for one in runtimes] == [{}, {}]
    with pytest.raises(ModelNotFound):
        served.named("a")
    assert served.adapter_names == {}, "nothing is left of what was loaded"


def test_requests_may_have_what_they_found_until_they_end(served_model: ServedModel, folder: Path) -> None:
    """While an adapter is replaced, unloaded and loaded again."""
    runtimes = FakeRuntime(), FakeRuntime()
    loads, served = opened(served_model, folder, *runtimes)

    async def run() -> None:
        await loads.load("a", "sql", in_place=False)
        first = loads.requests.begin()
        await loads.load("a", "law", in_place=True)
        second = loads.requests.begin()
        for one in runtimes:
            assert (one.names, one.digests) == ({"a": "law"}, {"sql", "law"})
        await loads.unload("a")
        for one in runtimes:
            assert (one.names, one.digests) == ({}, {"sql", "law"})
        await loads.load("a", "sql", in_place=False)
        assert served.adapter_names == {"sql": "a", "law": "a"}, "the log of requests says the name of both"
        loads.requests.end(second)
        assert [one.digests for one in runtimes] == [{"sql", "law"}] * 2, "the first may have found any"
        loads.requests.end(first)
        for one in runtimes:
            assert (one.names, one.digests) == ({"a": "sql"}, {"sql"})
        assert served.adapter_names == {"sql": "a"}

    asyncio.run(run())


def test_a_name_means_the_adapter_before_until_all_replicas_have_the_new_one(
    served_model: ServedModel, folder: Path
) -> None:
    fast, slow = FakeRuntime(), FakeRuntime()
    loads, served = opened(served_model, folder, fast, slow)

    async def run() -> None:
        await loads.load("a", "sql", in_place=False)
        slow.may_load.clear()
        loading = asyncio.create_task(loads.load("a", "law", in_place=True))
        for _ in range(1000):
            await asyncio.sleep(0)
            if "law" in fast.digests | slow.digests:
                break
            await asyncio.sleep(0.001)
        assert served.named("a").adapter == "sql"
        assert "sql" in fast.digests & slow.digests
        slow.may_load.set()
        await loading
        assert served.named("a").adapter == "law"
        assert [one.digests for one in (fast, slow)] == [{"law"}] * 2

    asyncio.run(run())


def test_a_replica_that_is_down_gets_what_the_server_has_by_then(served_model: ServedModel, folder: Path) -> None:
    up, down = FakeRuntime(), FakeRuntime(is_down=True)
    loads, served = opened(served_model, folder, up, down)

    async def run() -> None:
        await loads.load("a", "sql", in_place=False)
        await loads.load("b", "law", in_place=False)
        (folder / "law" / "adapter_config.json").write_text("other")
        down.is_down = False
        await asyncio.gather(loads.resume(down), loads.load("c", "sql", in_place=False))

    asyncio.run(run())
    assert down.n_resumed == 1
    assert up.loads == down.loads
    assert sorted(up.names) == sorted(served.adapted) == ["a", "c"], "the files of b have changed"


def test_an_unload_waits_for_no_load_of_another_name(served_model: ServedModel, folder: Path) -> None:
    """Of its own name it does, and takes the new adapter away."""
    runtime = FakeRuntime()
    loads, served = opened(served_model, folder, runtime)

    async def run() -> None:
        await loads.load("a", "sql", in_place=False)
        await loads.load("b", "sql", in_place=False)
        runtime.may_load.clear()
        loading = asyncio.create_task(loads.load("b", "law", in_place=True))
        while "law" not in runtime.digests:
            await asyncio.sleep(0.001)
        async with asyncio.timeout(5):
            await loads.unload("a")
        unloading = asyncio.create_task(loads.unload("b"))
        await asyncio.sleep(0.01)
        assert (list(served.adapted), unloading.done()) == (["b"], False)
        runtime.may_load.set()
        await asyncio.gather(loading, unloading)

    asyncio.run(run())
    assert runtime.loads == {}
    assert not served.adapted


def test_what_is_unloaded_while_a_runtime_starts_again_is_not_in_it(
    served_model: ServedModel, folder: Path
) -> None:
    up, down = FakeRuntime(), FakeRuntime(is_down=True)
    loads, served = opened(served_model, folder, up, down)

    async def run() -> None:
        for name in ("a", "b"):
            await loads.load(name, "sql", in_place=False)
        down.is_down = False
        down.may_load.clear()
        resuming = asyncio.create_task(loads.resume(down))
        while not down.loads:
            await asyncio.sleep(0.001)
        async with asyncio.timeout(5):
            await loads.unload("a")  # is being loaded
            await loads.unload("b")  # is still to be
        down.may_load.set()
        assert await resuming

    asyncio.run(run())
    assert up.loads == down.loads == {}
    assert not served.adapted


@pytest.mark.parametrize("n_errors", [2, 3])
def test_a_runtime_that_starts_again_tries_three_times_to_load(
    served_model: ServedModel, folder: Path, n_errors: int
) -> None:
    """Then the 404 says why nobody has the adapter any more, until it is loaded again."""
    up, down = FakeRuntime(), FakeRuntime(is_down=True)
    loads, served = opened(served_model, folder, up, down)

    async def run() -> None:
        await loads.load("a", "sql", in_place=False)
        down.is_down, down.error, down.n_errors = False, InvalidRequest("the disk is away"), n_errors
        assert await loads.resume(down)
        assert down.n_resumed == 1
        assert up.loads == down.loads
        if n_errors == 2:
            assert served.named("a").adapter == "sql"
            return
        with pytest.raises(ModelNotFound, match="^the adapter 'a' is not served any more: the disk is away; load"):
            served.named("a")
        await loads.load("a", "sql", in_place=False)
        await loads.unload("a")
        with pytest.raises(ModelNotFound, match="^there is no model 'a'; this server serves"):
            served.named("a")

    asyncio.run(run())


def test_a_runtime_that_dies_again_takes_no_requests(served_model: ServedModel, folder: Path) -> None:
    up, down = FakeRuntime(), FakeRuntime(is_down=True)
    loads, served = opened(served_model, folder, up, down)

    async def run() -> None:
        await loads.load("a", "sql", in_place=False)
        assert not await loads.resume(down)

    asyncio.run(run())
    assert down.n_resumed == 0
    assert list(served.adapted) == ["a"]


def test_an_unknown_model_is_told_a_few_of_many_adapters(served_model: ServedModel, folder: Path) -> None:
    loads, served = opened(served_model, folder, FakeRuntime())

    async def run() -> None:
        for n in range(100):
            await loads.load(f"adapter-{n}", "sql", in_place=False)

    asyncio.run(run())
    with pytest.raises(ModelNotFound, match=r"^there is no model 'x'; .*'adapter-15' and 84 more$"):
        served.named("x")


@pytest.mark.parametrize(
    ("error", "digest", "text"),
    [
        (InvalidRequest("cannot be read"), None, "cannot be read"),
        (RuntimeSilent("did not answer"), None, "did not answer"),
        (None, "changed", "have changed while they were read"),
    ],
)
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_load_that_fails_in_one_replica_changes_none(
    served_model: ServedModel,
    folder: Path,
    error: RequestError | None,
    digest: str | None,
    text: str,
    is_loaded: bool,
) -> None:
    """Also one that takes so long that nobody waits for it any more."""
    runtimes = FakeRuntime(), FakeRuntime()
    loads, served = opened(served_model, folder, *runtimes)

    async def run() -> None:
        if is_loaded:
            await loads.load("a", "sql", in_place=False)
        before = [dict(one.loads) for one in runtimes]
        runtimes[1].error, runtimes[1].digest = error, digest
        with pytest.raises(RequestError, match=text):
            await loads.load("a", "law", in_place=True)
        assert [one.loads for one in runtimes] == before
        assert list(served.adapted) == list(loads.paths) == (["a"] if is_loaded else [])
        runtimes[1].error = runtimes[1].digest = None
        await loads.load("a", "law", in_place=is_loaded)
        await loads.unload("a")

    asyncio.run(run())
    assert [one.loads for one in runtimes] == [{}, {}]


def test_a_load_that_is_cancelled_leaves_nothing(served_model: ServedModel, folder: Path) -> None:
    runtime = FakeRuntime()
    loads, served = opened(served_model, folder, runtime)

    async def run() -> None:
        runtime.may_load.clear()
        loading = asyncio.create_task(loads.load("a", "sql", in_place=False))
        while not runtime.loads:
            await asyncio.sleep(0.001)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading

    asyncio.run(run())
    assert runtime.loads == {}
    assert not served.adapted


@pytest.mark.parametrize("name", ["", "a\nb", "a\0", "\ud800", "a" * 257])
def test_names_are_short_and_printable(served_model: ServedModel, folder: Path, name: str) -> None:
    loads, _ = opened(served_model, folder, FakeRuntime())
    with pytest.raises(InvalidRequest, match="^lora_name is .*; give 1 to 256 printable characters$") as caught:
        asyncio.run(loads.load(name, "sql", in_place=False))
    assert caught.value.param == "lora_name"
    assert str(caught.value).isprintable()
