"""Patterns of an adapter's configuration never hold up the process, however long they take to match."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from radixkv.checkpoints.adapters import AdapterFolder
from radixkv.checkpoints.adapters import patterns as adapter_patterns
from radixkv.checkpoints.adapters.patterns import Match, Pattern, first_matches
from radixkv.errors import CheckpointError
from support.adapters import layer_modules, write_adapter

SLOW = "(.*.*)*x"
"""Matches no name of a module, which takes Python's re exponential time to find out."""
MODULES = layer_modules("self_attn.q_proj", "self_attn.v_proj")


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("target_modules", {"target_modules": f"{SLOW}|.*proj"}),
        ("exclude_modules", {"exclude_modules": SLOW}),
        ("layers_pattern", {"layers_pattern": [SLOW, "layers"], "layers_to_transform": [0]}),
        ("rank_pattern", {"rank_pattern": {"other": 8, SLOW: 8}}),
        ("alpha_pattern", {"alpha_pattern": {SLOW: 8}}),
    ],
)
def test_steps_go_on_beside_a_pattern_that_takes_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(adapter_patterns, "_CPU_S", 1)
    errors: list[CheckpointError] = []
    folder = write_adapter(tmp_path / "slow", MODULES, **fields)

    def load() -> None:
        try:
            AdapterFolder.open(folder, max_rank=16)
        except CheckpointError as error:
            errors.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    longest = 0.0
    while thread.is_alive():
        before = time.monotonic()
        time.sleep(0.001)
        longest = max(longest, time.monotonic() - before)
    assert longest < 0.5
    (error,) = errors
    assert f"{field} is " in str(error)
    assert "(.*.*)*x" in str(error)
    assert "takes more than 1 s" in str(error)


def test_patterns_of_modules_that_the_adapter_lacks_are_matched_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pattern that matches all modules of the adapter at once can be slow with one of the base."""
    monkeypatch.setattr(adapter_patterns, "_CPU_S", 1)
    write_adapter(tmp_path, layer_modules("self_attn.q_proj"), target_modules=f".*q_proj|{SLOW}")
    folder = AdapterFolder.open(tmp_path, max_rank=16)
    shapes = dict.fromkeys(layer_modules("self_attn.q_proj", "self_attn.v_proj"), (6, 8))
    with pytest.raises(CheckpointError, match=r"target_modules is .*takes more than 1 s"):
        folder.for_base("model.layers.", shapes)


def test_a_pattern_that_takes_too_much_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_patterns, "_BYTES", 32 << 20)
    write_adapter(tmp_path, MODULES, target_modules="a" * 900_000 + "|.*proj")
    with pytest.raises(CheckpointError, match=r"target_modules is 'aaa.* takes more than 32 MiB of memory;"):
        AdapterFolder.open(tmp_path, max_rank=16)


def test_the_first_of_each_group_that_matches_decides() -> None:
    def pattern(text: str, kind: Any) -> Pattern:
        return Pattern(text, kind, "field", text)

    groups = [
        [pattern("a", "whole"), pattern("a", "begin"), pattern("ab", "begin")],
        [],
        [pattern(r"b|.*?(?P<index>\d+)", "index"), pattern(r"(?P<index>b)", "index")],
    ]
    assert first_matches(groups, ["a", "ab", "b", "ac7", "a\ud800"], Path()) == [
        {"a": Match(0, ""), "ab": Match(1, ""), "ac7": Match(1, ""), "a\ud800": Match(1, "")},
        {},
        {"b": Match(0, ""), "ac7": Match(0, "7")},
    ]


def test_an_error_names_the_pattern_that_is_none() -> None:
    groups = [[Pattern("a", "whole", "exclude_modules", "a")], [Pattern("(b", "begin", "rank_pattern", "b")]]
    with pytest.raises(CheckpointError, match=r"rank_pattern is 'b'; it is not a regular expression: missing \)"):
        first_matches(groups, ["a"], Path())


def test_without_a_process_the_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_patterns, "_PROGRAM", "x" * 10_000_000)
    with pytest.raises(CheckpointError, match="no process can be started that matches them"):
        first_matches([[Pattern("a", "whole", "target_modules", "a")]], ["a"], Path("adapter_config.json"))
