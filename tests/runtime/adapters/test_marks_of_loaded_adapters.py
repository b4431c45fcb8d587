"""Marks of activated LoRAs that come and go: each has one for as long as the process lives, and keeps it."""

from __future__ import annotations

import pytest

from radixkv.runtime.adapters.loading import LoadableAdapters
from radixkv.tree.marks import Marks
from radixkv.wire.adapter_messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from radixkv.wire.cache_messages import Explain
from radixkv.wire.messages import Done, Failed, pack_tokens
from radixkv.wire.namespace import CacheNamespace
from support.fake_adapters import FakeDeviceAdapters
from support.loop_frontend import PROMPT, Frontend

JUDGE, SAME_MARK, RANK = "12ab" * 16, "12ab12ab" + "0" * 56, "34cd" * 16
FOLDERS = {"/judge": JUDGE, "/same": SAME_MARK, "/rank": RANK}


def loaded(front: Frontend, name: str, path: str) -> AdapterLoaded | Failed:
    assert front.loop.receive(LoadAdapter(name, name, path)) == []
    front.loop.wait(5.0)
    (reply,) = front.loop.turn()
    assert isinstance(reply, AdapterLoaded | Failed)
    return reply


@pytest.mark.parametrize("n_unloaded", [0, 20])
def test_adapters_that_were_unloaded_do_not_keep_others_from_being_searched(n_unloaded: int) -> None:
    """Though they keep their marks."""
    folders = {f"/{number}": f"{number:04x}" * 16 for number in range(n_unloaded + 1)}
    device = FakeDeviceAdapters(folders, invocations=dict.fromkeys(folders.values(), (5,)))
    front = Frontend(adapters=LoadableAdapters(device, marks=Marks()))
    for number in range(n_unloaded + 1):
        loaded(front, str(number), f"/{number}")
        if number:
            front.loop.receive(UnloadAdapter(str(number)))
            front.turn()
    front.serve("a", PROMPT, adapter=folders["/0"])
    done = front.serve("b", PROMPT).terminal
    assert isinstance(done, Done)
    assert done.miss is not None
    assert (done.miss.reason, done.miss.n_elsewhere, done.miss.is_other_adapter) == ("other_namespace", 8, True)


def test_a_mark_is_never_another_adapters() -> None:
    """Neither while an adapter is loaded nor after, as its pages may be left."""
    device = FakeDeviceAdapters(FOLDERS, invocations=dict.fromkeys(FOLDERS.values(), (5,)))
    front = Frontend(adapters=LoadableAdapters(device, marks=Marks()))
    assert isinstance(loaded(front, "judge", "/judge"), AdapterLoaded)
    front.serve("a", PROMPT, adapter=JUDGE)
    front.loop.receive(UnloadAdapter("judge"))
    front.turn()
    assert device.sizes == {}
    refused = loaded(front, "same", "/same")
    assert isinstance(refused, Failed)
    assert "has the mark of 12ab12ab12ab…" in refused.text
    assert device.sizes == {}, "nothing of it is left"
    assert not device.undecided, "and no memory"
    assert isinstance(loaded(front, "rank", "/rank"), AdapterLoaded)
    again = loaded(front, "again", "/judge")
    assert isinstance(again, AdapterLoaded)
    assert again.adapter.invocation_tokens == (5,)
    explained = [
        front.loop.receive(Explain("e", pack_tokens(PROMPT), CacheNamespace(adapter=adapter)))[0].n_cached
        for adapter in (JUDGE, RANK, "")
    ]
    assert explained == [10, 4, 4], "the same bytes hit; others and the model have what is before the invocation"
