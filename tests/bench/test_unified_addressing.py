"""The benchmark of attention over host memory: its arithmetic, and where it finds the layers of a slot."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.paths import ROOT


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "bench")
        yield importlib.import_module("unified_addressing")


def ends(bench: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Returns the exit code, or the message, with which the script ends."""
    monkeypatch.setattr(sys, "argv", ["unified_addressing.py", *arguments])
    with pytest.raises(SystemExit) as end:
        bench.main()
    return end.value.code


def test_help_and_wrong_use_need_no_gpu(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends(bench, monkeypatch, "--help") == 0
    assert "--lengths" in capsys.readouterr().out
    assert ends(bench, monkeypatch, "--tokens", "7") == 2
    assert "invalid choice: 7" in capsys.readouterr().err
    assert ends(bench, monkeypatch, "--lengths", "1000") == 2
    assert "--lengths must be positive multiples of 32" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ends(bench, monkeypatch) == "unified_addressing.py needs an NVIDIA GPU, and torch finds none"


def test_totals_and_break_even_by_hand(bench: Any) -> None:
    parts = bench.Parts(
        copy=10.0, device_first=2.0, direct_first=6.0, beside_first=14.0, device_step=1.0, direct_step=4.0
    )
    assert [parts.copied(3), parts.direct(3), parts.beside(3)] == [15.0, 18.0, 17.0]
    assert parts.break_even_steps == 2.0
    assert parts.copied(2) == parts.direct(2) == 14.0
    assert replace(parts, direct_first=20.0).break_even_steps == pytest.approx(-8 / 3), "copying always wins"
    assert replace(parts, direct_step=1.0).break_even_steps is None, "copying never wins"


def test_predictions_by_hand(bench: Any) -> None:
    assert bench.TOKEN_BYTES == bench.PAGE.n_bytes // bench.PAGE.page_size == 131_072
    decode = bench.predicted(16_384, 1)  # 2 GiB
    assert decode.copy == pytest.approx(0.15 + 2**31 / 50.8e6)
    assert decode.direct_first == decode.direct_step == pytest.approx(2**31 / 45e6)
    assert decode.device_step == pytest.approx(2**31 / 3.7e9)
    assert decode.beside_first == pytest.approx(decode.copy + decode.direct_first)
    prompt = bench.predicted(16_384, 1024)
    assert prompt.direct_first == pytest.approx(32 * 2**31 / 45e6), "32 tiles read the prefix"
    assert bench.predicted(16_384, 64).direct_first == pytest.approx(2 * 2**31 / 45e6)


def test_lines_have_measured_and_predicted_times(bench: Any) -> None:
    parts = bench.predicted(4096, 1)
    line = bench.totals_line(4096, 1, 4, parts)
    for name in ("copied_ms", "direct_ms", "beside_ms", "break_even_steps"):
        assert line[name] == line[f"predicted_{name}"]
    rates = bench.lengths_line(4096, 1, 1, parts)
    assert (rates["direct_step_gb_per_s"], rates["copy_ms"]) == (45.0, round(parts.copy, 3))


def test_prefixes_together_do_not_fit_a_cache(bench: Any) -> None:
    for length in bench.LENGTHS:
        assert length % bench.TILE_TOKENS == 0
        n = bench.n_sets(length)
        assert n * length * bench.TOKEN_BYTES >= bench.CACHE_BYTES
        assert n == 1 or (n - 1) * length * bench.TOKEN_BYTES < bench.CACHE_BYTES
    assert all(n == 1 or n % bench.TILE_TOKENS == 0 for n in bench.N_TOKENS)
    turns = bench.Turns(3)
    assert [turns.span(4) for _ in range(4)] == [(4, 8), (8, 12), (0, 4), (4, 8)]


def test_rounds_end_in_time_but_not_after_the_first(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(bench.rounds(lambda: 0.0)) == bench.N_ROUNDS
    monkeypatch.setattr(bench, "MAX_SECONDS", 0.0)
    assert len(bench.rounds(lambda: 0.0)) == 2
