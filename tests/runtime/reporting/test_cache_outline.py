"""``Outline`` against what requests have left in the trees, and what it does not tell."""

from __future__ import annotations

import pytest

from radixkv.runtime.intake import Intake
from radixkv.runtime.protocols.adapters import Adapters
from radixkv.runtime.reporting import cache_commands
from radixkv.runtime.reporting.cache_commands import MAX_SHOWN_TOKENS, CacheCommands
from radixkv.runtime.structured.gate import GrammarGate
from radixkv.wire import cache_messages
from radixkv.wire import messages as wire
from support.engine import Engine, prompt
from support.fake_grammars import FakeCompiler
from support.loop_frontend import Frontend

PAGE_SIZE = 4
READY = wire.Ready(wire.WIRE_VERSION, 1000, 200, PAGE_SIZE, 64, 8, 64, "fake", "float32")


def outlined(front: Frontend, *, contents: bool = True) -> cache_messages.TierOutline:
    (reply,) = front.loop.receive(cache_messages.Outline("o", contents))
    assert isinstance(reply, cache_messages.Outlined), reply
    assert (reply.id, reply.host) == ("o", None)
    return reply.device


def test_the_outline_is_the_tree_that_requests_have_made() -> None:
    front = Frontend(n_pages=256)
    shared = prompt(24, 1)
    for index, end in enumerate((7, 8, 9)):
        front.serve(f"r{index}", [*shared, *prompt(16, end)], max_tokens=1)
    found = outlined(front)
    root, run, *ends = found.nodes
    assert (root.parent, root.n_own_pages, root.n_pages) == (-1, 0, 18)
    assert (run.parent, run.n_own_pages, run.n_pages, run.n_leases) == (0, 6, 18, 0)
    assert [(end.parent, end.n_own_pages, end.age) for end in ends] == [(1, 4, 2), (1, 4, 1), (1, 4, 0)]
    assert wire.unpack_tokens(run.tokens) == shared[:MAX_SHOWN_TOKENS]
    assert (found.n_pages, found.n_not_visited) == (18, 0)


def test_running_requests_hold_their_runs() -> None:
    front = Frontend()
    front.submit("a", prompt(16, 1), max_tokens=8)
    front.turn()
    assert [node.n_leases for node in outlined(front).nodes] == [1, 1]
    front.run()
    assert {node.n_leases for node in outlined(front).nodes} == {0}


def test_salts_are_labels_that_differ_and_stay_and_no_salt_has_none() -> None:
    front = Frontend(n_pages=256)
    for index, salt in enumerate(("secret-one", "secret-two", "")):
        front.serve(f"r{index}", prompt(16, 1), salt=salt, max_tokens=1)
    labels = [node.namespace for node in outlined(front).nodes if node.parent < 0]
    assert len(set(labels)) == 3
    assert labels.count("") == 1
    assert labels == [node.namespace for node in outlined(front).nodes if node.parent < 0]
    assert b"secret" not in wire.encode(front.loop.receive(cache_messages.Outline("o"))[0])
    assert not set(labels) & {node.namespace for node in outlined(other_start()).nodes if node.namespace}


def other_start() -> Frontend:
    front = Frontend()
    front.serve("a", prompt(16, 1), salt="secret-one", max_tokens=1)
    return front


def test_without_contents_there_are_no_tokens() -> None:
    front = Frontend()
    front.serve("a", prompt(16, 1), max_tokens=1)
    assert any(node.tokens for node in outlined(front).nodes)
    assert not any(node.tokens for node in outlined(front, contents=False).nodes)


@pytest.mark.parametrize("has_host", [False, True])
def test_the_tiers_share_the_bound_and_each_has_its_tree(has_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_commands, "MAX_OUTLINED_NODES", 20)
    engine = Engine(256, PAGE_SIZE, n_slots=256 if has_host else 0)
    for first in range(30):
        engine.serve([first + 1, *prompt(8, 1)], 1)
    engine.turn(40)
    intake = Intake(
        READY, marks=engine.cache.tree.marks, eos_token_ids=frozenset(), seed=0, clock=lambda: engine.now
    )
    commands = CacheCommands(
        intake,
        engine.scheduler,
        GrammarGate(FakeCompiler, 8),
        Adapters(),
        find_pin=engine.pins.find,
        others={},
        before_flush=engine.pins.clear,
    )
    reply = commands.run(cache_messages.Outline("o"))
    engine.check_invariants()
    tiers = [reply.device] if reply.host is None else [reply.device, reply.host]
    assert len(tiers) == 1 + has_host
    assert sum(len(tier.nodes) for tier in tiers) == 20
    for tier, tree in zip(tiers, (engine.cache.tree, engine.host.tree), strict=False):
        assert tier.n_pages == tree.n_pages_reachable
        n_shown = sum(node.n_own_pages for node in tier.nodes)
        assert n_shown + sum(node.n_more_pages for node in tier.nodes) == tier.n_pages - tier.n_not_visited
    if reply.joint is None:
        assert not has_host
        return
    runs = reply.joint.nodes
    assert {run.tiers for run in runs} == {("device", "host")}, "what is computed is stored"
    assert reply.joint.n_pages == reply.device.n_pages == sum(run.n_own_pages + run.n_more_pages for run in runs)
    assert all(run.idle_s is not None for run in runs)
