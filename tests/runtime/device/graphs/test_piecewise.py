"""What runs before pieces of a step are captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from radixkv.runtime.device.graphs import piecewise
from radixkv.runtime.device.graphs.piecewise import PiecewiseGraphs
from radixkv.runtime.device.model.activations import Activations

N_LAYERS = 4


class RecordingDecoder:
    """Notes which pieces run, and with how many tokens."""

    n_mixers = N_LAYERS
    distinct_mixers = (0, 2)

    def __init__(self) -> None:
        self.ran: list[tuple[int, int]] = []

    def empty_activations(self, n_tokens: int) -> Activations:
        return Activations(*(torch.empty(n_tokens, 1) for _ in range(3)), None)

    def run_before_first_mixer(self, activations: Activations, inputs: object, pool: object) -> None:
        self.ran.append((-1, len(activations.residual)))

    def run_between_mixers(self, index: int, activations: Activations, inputs: object, pool: object) -> None:
        self.ran.append((index, len(activations.residual)))


def test_a_piece_of_each_kind_runs_before_any_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of another kind may have other kernels, whose first call cannot be captured."""
    decoder, captured = RecordingDecoder(), []

    def capture(body: Callable[[], object], stream: object, memory: object) -> object:
        before = list(decoder.ran)
        body()
        (piece,) = decoder.ran[len(before) :]
        assert {(layer, piece[1]) for layer in (-1, *decoder.distinct_mixers)} <= set(before)
        captured.append(piece)
        return object()

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(piecewise, "capture_graph", capture)
    anything: Any = None
    graphs = PiecewiseGraphs(decoder, anything)  # type: ignore[arg-type]
    assert graphs.capture([2, 5], lambda _: anything, anything) == 2 * N_LAYERS
    assert captured == [(layer, bucket) for bucket in (5, 2) for layer in range(-1, N_LAYERS - 1)]
