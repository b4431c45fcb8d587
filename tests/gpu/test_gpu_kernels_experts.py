"""Mixtures of experts: routing against sorted lists, and the whole operation against torch in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_support import DEVICE, check_close, normal, on_device_only, on_kernels
from torch import Tensor

from radixkv.runtime.device.ops.base import Fp8Rows, RowScales
from radixkv.runtime.device.ops.cuda.expert_routing import SigmoidScores, most_tiles, route
from radixkv.runtime.device.ops.cuda.expert_sums import sum_experts
from radixkv.runtime.device.ops.cuda.grouped_linear import grouped_tiles
from radixkv.runtime.device.ops.cuda.layers import LayerNorm, Linear, Mlp, RMSNorm
from radixkv.runtime.device.ops.cuda.operations import Experts, SharedExpert
from radixkv.runtime.device.weights.layer_weights import LinearWeights

pytestmark = on_kernels

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
"""The interpreter's products have no bfloat16."""


def chosen_experts(logits: Tensor, n_active: int) -> Tensor:
    """Returns each token's experts, [tokens, active], by index; of equal logits the first."""
    return logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :n_active].sort(-1).values


def check_routing(logits: Tensor, n_active: int, tile_rows: int, *, normalizes: bool) -> None:
    n_tokens, n_experts = logits.shape
    routing = route(logits, n_active, tile_rows, normalizes=normalizes)
    chosen = chosen_experts(logits, n_active)
    weights = logits.double().softmax(-1).gather(1, chosen)
    if normalizes:
        weights /= weights.sum(-1, keepdim=True)
    check_close(routing.expert_weights, weights)

    by_expert: dict[int, list[int]] = {}
    for pair, expert in enumerate(chosen.flatten().tolist()):
        by_expert.setdefault(expert, []).append(pair)
    order: list[int] = []
    tiles: list[list[int]] = []
    for expert, pairs in sorted(by_expert.items()):
        end = len(order) + len(pairs)
        tiles += [[expert, first, end] for first in range(len(order), end, tile_rows)]
        order += pairs
    assert routing.order.tolist() == order
    n_tiles = routing.tiles.shape[1]
    assert n_tiles == most_tiles(n_tokens * n_active, n_experts, tile_rows)
    assert routing.tiles.t()[: len(tiles)].tolist() == tiles
    assert (routing.tiles[0, len(tiles) :] == -1).all()


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """Draws logits, many of them equal, active experts and rows of a tile."""
    n_experts = draw(st.integers(1, 40))
    n_tokens = draw(st.integers(1, 200))
    n_values = draw(st.sampled_from([1, 3, 1000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    logits = torch.randint(n_values, (n_tokens, n_experts), generator=generator).float() / 100
    logits[:, 0] += draw(st.sampled_from([-50.0, 0.0, 50.0]))
    return logits.to(DEVICE), draw(st.integers(1, min(n_experts, 9))), draw(st.sampled_from([16, 64, 128]))


@settings(max_examples=40, deadline=None)
@given(routings(), st.booleans())
def test_pairs_are_ordered_by_expert_and_then_by_token(drawn: tuple[Tensor, int, int], normalizes: bool) -> None:
    check_routing(*drawn, normalizes=normalizes)


@pytest.mark.parametrize(
    ("n_tokens", "n_experts", "n_active"), [(1, 128, 8), (16, 128, 8), (33, 128, 8), (1500, 60, 4), (3, 1000, 5)]
)
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_routing_in_one_and_in_several_blocks(
    n_tokens: int, n_experts: int, n_active: int, dtype: torch.dtype
) -> None:
    check_routing(normal(n_tokens, n_experts, dtype=dtype), n_active, 16, normalizes=True)


@on_device_only
@pytest.mark.parametrize("n_tokens", [512, 8192])
def test_routing_of_model_size(n_tokens: int) -> None:
    check_routing(normal(n_tokens, 128, dtype=HALF), 8, 64, normalizes=True)


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize(("n_tokens", "n_experts", "n_active"), [(1, 128, 6), (33, 128, 6), (300, 20, 3)])
def test_routing_by_sigmoids(n_tokens: int, n_experts: int, n_active: int, normalizes: bool) -> None:
    """A correction decides which experts compute, and not their weights."""
    logits = normal(n_tokens, n_experts, dtype=torch.float32)
    correction = normal(n_experts, dtype=torch.float32, scale=0.5)
    scores = SigmoidScores(correction, 2.5)
    routing = route(logits, n_active, 16, normalizes=normalizes, dtype=HALF, sigmoid=scores)
    chosen = chosen_experts(logits.sigmoid() + correction, n_active)
    assert not torch.equal(chosen, chosen_experts(logits, n_active))
    weights = logits.double().sigmoid().gather(1, chosen)
    if normalizes:
        weights /= weights.sum(-1, keepdim=True)
    assert routing.expert_weights.dtype == HALF
    check_close(routing.expert_weights, 2.5 * weights)
    of_pairs = chosen.flatten()[routing.order.long()]
    assert torch.equal(of_pairs, chosen.flatten().sort().values)


def test_sigmoids_of_large_and_of_wrong_logits() -> None:
    logits = torch.full((4, 20), -200.0, device=DEVICE)
    logits[1] = 200.0
    logits[2, 5] = float("nan")
    scores = SigmoidScores(torch.zeros(20, device=DEVICE), 1.0)
    routing = route(logits, 3, 16, normalizes=True, sigmoid=scores)
    assert sorted(routing.order.tolist()) == list(range(12))
    assert routing.expert_weights[[0, 3]].tolist() == [[0.0] * 3] * 2
    check_close(routing.expert_weights[1], torch.full((3,), 1 / 3, device=DEVICE))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("n_tokens", [5, 300])
def test_logits_that_are_not_finite_stay_with_their_token(n_tokens: int, wrong: float) -> None:
    logits = normal(n_tokens, 20, dtype=torch.float32)
    logits[3] = wrong
    routing = route(logits, 3, 16, normalizes=True)
    assert sorted(routing.order.tolist()) == list(range(3 * n_tokens))
    is_finite = routing.expert_weights.isfinite().all(-1)
    assert is_finite.tolist() == [token != 3 for token in range(n_tokens)]


def test_the_number_of_tiles_is_enough_and_not_more() -> None:
    for n_pairs, n_experts, rows in ((8, 128, 16), (4096, 128, 64), (40, 3, 16)):
        n_used = min(n_pairs, n_experts)
        # All experts but one have a single pair, or one more than whole tiles.
        counts = [1] * n_used
        counts[0] += (n_pairs - n_used) // rows * rows
        worst = sum(-(-count // rows) for count in counts)
        assert worst == most_tiles(n_pairs, n_experts, rows)


def make_experts(
    n_experts: int = 8,
    n_active: int = 2,
    *,
    dtype: torch.dtype = HALF,
    hidden: int = 72,
    inner: int = 40,
    **changes: Any,
) -> Experts:
    """Returns a mixture whose sizes are no multiples of a tile's."""

    def weights(n_out: int, n_in: int) -> LinearWeights:
        return LinearWeights(normal(n_experts, n_out, n_in, dtype=dtype, scale=n_in**-0.5))

    router = Linear(normal(n_experts, hidden, dtype=dtype, scale=hidden**-0.5), None)
    mixture = Experts(router, weights(2 * inner, hidden), weights(hidden, inner), "silu", n_active, True)
    return replace(mixture, **changes)


def make_experts_without_gates(
    n_experts: int = 8, n_active: int = 3, *, hidden: int = 72, inner: int = 40
) -> Experts:
    """Returns a mixture with squared activations, whose router takes sigmoids, and a shared expert."""

    def linear(n_out: int, n_in: int) -> Linear:
        return Linear(normal(n_out, n_in, dtype=HALF, scale=n_in**-0.5), None)

    mixture = make_experts(n_experts, n_active, hidden=hidden, inner=inner, activation="relu2")
    return replace(
        mixture,
        router=Linear(normal(n_experts, hidden, dtype=torch.float32, scale=hidden**-0.5), None),
        gate_up=LinearWeights(normal(n_experts, inner, hidden, dtype=HALF, scale=hidden**-0.5)),
        shared=SharedExpert(Mlp(linear(2 * inner, hidden), linear(hidden, 2 * inner), "relu2"), None),
        sigmoid=SigmoidScores(normal(n_experts, dtype=torch.float32, scale=0.2), 2.5),
    )


def oracle_without_gates(mixture: Experts, x: Tensor) -> Tensor:
    """Computes such a mixture in float64."""
    assert mixture.sigmoid is not None
    assert mixture.shared is not None

    def mlp(up: Tensor, down: Tensor, row: Tensor) -> Tensor:
        inner = (up.double() @ row.double()).to(x.dtype).double().relu().square()
        return (down.double() @ inner.to(x.dtype).double()).to(x.dtype).double()

    scores = mixture.router(x.float()).double().sigmoid()
    chosen = chosen_experts(scores + mixture.sigmoid.correction, mixture.n_active)
    weights = scores.gather(1, chosen)
    weights = (mixture.sigmoid.scale * weights / weights.sum(-1, keepdim=True)).to(x.dtype).double()
    shared = mixture.shared.mlp
    total = torch.zeros_like(x, dtype=torch.float64)
    for token, row in enumerate(x):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            total[token] += weight * mlp(mixture.gate_up.weight[expert], mixture.down.weight[expert], row)
        total[token] += mlp(shared.gate_up.weight, shared.down.weight, row)
    return total


@pytest.mark.parametrize("n_tokens", [1, 21, 100])
def test_experts_without_gates(n_tokens: int) -> None:
    """Nemotron 3's: a shared expert without a weight, and a router by sigmoids."""
    mixture, x = make_experts_without_gates(), normal(n_tokens, 72, dtype=HALF)
    check_close(mixture(x), oracle_without_gates(mixture, x), slack=4.0, n_roundings=3)


@on_device_only
@pytest.mark.parametrize("n_tokens", [1, 100, 3000])
def test_experts_without_gates_of_model_size(n_tokens: int) -> None:
    mixture = make_experts_without_gates(128, 6, hidden=2688, inner=1856)
    x = normal(n_tokens, 2688, dtype=HALF)
    out, some = mixture(x), list(range(0, n_tokens, max(n_tokens // 9, 1)))
    assert torch.equal(out, mixture(x))
    check_close(out[some], oracle_without_gates(mixture, x[some]), slack=4.0, n_roundings=3)


def with_biases(mixture: Experts) -> Experts:
    dtype = mixture.down.weight.dtype

    def biased(weights: LinearWeights) -> LinearWeights:
        return replace(weights, bias=normal(*weights.weight.shape[:2], dtype=dtype))

    router = replace(mixture.router, bias=normal(len(mixture.router.weight), dtype=dtype))
    return replace(mixture, router=router, gate_up=biased(mixture.gate_up), down=biased(mixture.down))


def oracle(mixture: Experts, x: Tensor, routed: Tensor | None = None) -> Tensor:
    """Computes the mixture in float64, with the routing that the router's product gives for other rows or x."""
    logits = mixture.router(x if routed is None else routed)
    chosen = chosen_experts(logits, mixture.n_active)
    expert_weights = logits.double().softmax(-1).gather(1, chosen)
    if mixture.normalizes:
        expert_weights /= expert_weights.sum(-1, keepdim=True)
    if mixture.scales is not None:
        expert_weights *= mixture.scales.double()[chosen]
    total = torch.zeros_like(x, dtype=torch.float64)
    for token, rank in torch.cartesian_prod(torch.arange(len(x)), torch.arange(mixture.n_active)).tolist():
        expert = int(chosen[token, rank])

        def product(weights: LinearWeights, row: Tensor, expert: int = expert) -> Tensor:
            out = weights.weight[expert].double() @ row
            return (out if weights.bias is None else out + weights.bias[expert].double()).to(x.dtype).double()

        gate, up = product(mixture.gate_up, x[token].double()).chunk(2)
        if mixture.activation == "clamped_silu":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            activated = gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
        elif mixture.activation == "gelu_tanh":
            activated = torch.nn.functional.gelu(gate, approximate="tanh") * up
        else:
            activated = torch.nn.functional.silu(gate) * up
        out = product(mixture.down, activated.to(x.dtype).double())
        total[token] += expert_weights[token, rank].to(x.dtype).double() * out
    return total


def check_experts(mixture: Experts, x: Tensor) -> None:
    out = mixture(x)
    check_close(out, oracle(mixture, x), slack=4.0, n_roundings=2)
    assert torch.equal(out, mixture(x))


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("n_tokens", [1, 2, 30, 100, 300])
def test_experts(n_tokens: int, dtype: torch.dtype) -> None:
    """The numbers of tokens have other tiles, and the last two other launches."""
    check_experts(make_experts(dtype=dtype), normal(n_tokens, 72, dtype=dtype))


@on_device_only
def test_experts_in_float16() -> None:
    check_experts(make_experts(dtype=torch.float16), normal(30, 72, dtype=torch.float16))


def test_the_sizes_above_have_all_tiles() -> None:
    assert {grouped_tiles(2 * n, 8, 2, has_room=False).first.rows for n in (1, 2, 30, 100, 300)} == {16, 64, 128}
    assert {grouped_tiles(2 * n, 8, 4, has_room=False).first.rows for n in (1, 2, 30, 100, 300)} == {16, 64}


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizes": False},
        {"activation": "clamped_silu"},
        {"activation": "gelu_tanh"},
        {"n_active": 1},
        {"n_active": 8},
        {"n_experts": 1, "n_active": 1},
        {"n_experts": 20, "n_active": 5},
        {"hidden": 128, "inner": 64},
        {"hidden": 24, "inner": 9},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_biases", [False, True])
def test_kinds_of_experts(has_biases: bool, changes: dict[str, Any]) -> None:
    mixture = make_experts(**changes)
    x = normal(21, mixture.down.weight.shape[1], dtype=HALF)
    check_experts(with_biases(mixture) if has_biases else mixture, x)


@pytest.mark.parametrize("n_tokens", [5, 300])
@pytest.mark.parametrize("chunk_tokens", [8192, 128])
def test_experts_beside_an_mlp(chunk_tokens: int, n_tokens: int) -> None:
    """The router reads other rows than the experts, whose weights have scales."""
    scales = normal(8, dtype=HALF).abs() + 0.1
    mixture = make_experts(activation="gelu_tanh", scales=scales, chunk_tokens=chunk_tokens)
    x, routed = normal(n_tokens, 72, dtype=HALF), normal(n_tokens, 72, dtype=HALF)
    check_close(mixture.mixed(x, routed), oracle(mixture, x, routed), slack=4.0, n_roundings=2)


def test_large_gates_of_gelu() -> None:
    mixture = make_experts(activation="gelu_tanh")
    x = normal(9, 72, dtype=HALF, scale=100.0)
    check_experts(mixture, x)


def test_gates_beyond_the_limit() -> None:
    mixture = with_biases(make_experts(activation="clamped_silu"))
    bias = mixture.gate_up.bias
    assert bias is not None
    bias.mul_(20)
    check_experts(mixture, normal(10, 72, dtype=HALF))


@pytest.mark.parametrize("favourite", [30.0, -30.0])
def test_all_tokens_or_none_go_to_one_expert(favourite: float) -> None:
    mixture = make_experts(n_active=1)
    bias = torch.zeros(8, dtype=HALF, device=DEVICE)
    bias[5] = favourite
    mixture = replace(mixture, router=replace(mixture.router, bias=bias))
    x = normal(40, 72, dtype=HALF)
    assert set(chosen_experts(mixture.router(x), 1).flatten().tolist()) & {5} == ({5} if favourite > 0 else set())
    check_experts(mixture, x)


def test_equal_logits_choose_the_first_experts() -> None:
    mixture = make_experts(n_active=3)
    mixture.router.weight.zero_()
    x = normal(9, 72, dtype=HALF)
    assert chosen_experts(mixture.router(x), 3).tolist() == [[0, 1, 2]] * 9
    check_experts(mixture, x)


def test_a_token_that_is_not_finite_leaves_others_alone() -> None:
    mixture = make_experts()
    x = normal(20, 72, dtype=HALF)
    x[7, 3] = float("nan")
    out = mixture(x)
    others = [token for token in range(20) if token != 7]
    assert out[7].isnan().all()
    check_close(out[others], oracle(mixture, x)[others], slack=4.0, n_roundings=2)


def norms(hidden: int) -> Iterator[RMSNorm | LayerNorm]:
    weight, bias = (normal(hidden, dtype=HALF) for _ in range(2))
    yield from (RMSNorm(weight, 1e-5, False), RMSNorm(weight, 1e-5, True), LayerNorm(weight, bias, 1e-5))


@pytest.mark.parametrize("n_tokens", [1, 50])
def test_add_and_norm(n_tokens: int) -> None:
    mixture = make_experts()
    for norm in norms(72):
        x, residual = (normal(n_tokens, 72, dtype=HALF) for _ in range(2))
        expected_residual = residual.clone()
        expected = norm.add(mixture(x), expected_residual)
        assert torch.equal(mixture.add_and_norm(x, residual, norm), expected)
        assert torch.equal(residual, expected_residual)


def test_chunks_of_a_long_prompt() -> None:
    mixture, x, residual = make_experts(chunk_tokens=16), normal(50, 72, dtype=HALF), normal(50, 72, dtype=HALF)
    check_experts(mixture, x)
    total, norm = residual.double() + oracle(mixture, x), next(norms(72))
    normed = mixture.add_and_norm(x, residual, norm)
    check_close(residual, total, slack=4.0, n_roundings=2)
    assert torch.equal(normed, norm(residual))


@pytest.mark.parametrize("scales", ["rows", "groups"])
def test_chunks_of_a_long_prompt_in_fp8(scales: RowScales) -> None:
    hidden = 200
    mixture, x, residual = (
        make_experts(hidden=hidden, chunk_tokens=16),
        normal(50, hidden, dtype=HALF),
        normal(50, hidden, dtype=HALF),
    )
    norm = RMSNorm(normal(hidden, dtype=HALF), 1e-5, False, scales)
    normed = mixture.add_and_norm(x, residual, norm)
    expected = norm(residual)
    assert isinstance(normed, Fp8Rows)
    assert isinstance(expected, Fp8Rows)
    assert torch.equal(normed.values[:50].view(torch.uint8), expected.values[:50].view(torch.uint8))
    assert torch.equal(normed.scales[:50], expected.scales[:50])


@on_device_only
@pytest.mark.parametrize(("hidden", "inner", "n_experts", "n_active"), [(2048, 768, 128, 8), (2880, 2880, 32, 4)])
@pytest.mark.parametrize("n_tokens", [1, 7, 100, 600, 3000])
def test_experts_of_model_size(hidden: int, inner: int, n_experts: int, n_active: int, n_tokens: int) -> None:
    mixture = make_experts(n_experts, n_active, hidden=hidden, inner=inner)
    x = normal(n_tokens, hidden, dtype=HALF)
    out = mixture(x)
    assert torch.equal(out, mixture(x))
    some = list(range(0, n_tokens, max(n_tokens // 9, 1)))
    check_close(out[some], oracle(mixture, x[some]), slack=4.0, n_roundings=2)


@on_device_only
@pytest.mark.parametrize("n_tokens", [5, 100, 3000])
def test_a_token_has_the_same_bits_wherever_it_is(n_tokens: int) -> None:
    """The router's product comes from cuBLAS, whose bits may depend on the row; here it decides nothing closely."""
    mixture = make_experts(32, 4, hidden=256, inner=128)
    x = normal(n_tokens, 256, dtype=HALF)
    moved = torch.randperm(n_tokens, device=DEVICE)
    routed = mixture.router(x)
    assert torch.equal(mixture.router(x[moved]), routed[moved])
    assert torch.equal(mixture(x[moved]), mixture(x)[moved])


@on_device_only
@pytest.mark.parametrize("n_tokens", [1, 20, 100, 700])
def test_a_graph_replays_what_kernels_give_one_by_one(n_tokens: int) -> None:
    """Each layer routes what the one before computed; the replays get inputs that the capture did not see."""
    layers = [make_experts(128, 8, hidden=2048, inner=768) for _ in range(4)]
    norm = RMSNorm(1 + normal(2048, dtype=HALF, scale=0.1), 1e-5, False)
    residual, normed = (torch.empty(n_tokens, 2048, dtype=HALF, device=DEVICE) for _ in range(2))
    inputs = [normal(n_tokens, 2048, dtype=HALF) for _ in range(3)]

    def run() -> None:
        rows = norm(residual)
        for layer in layers:
            rows = layer.add_and_norm(rows, residual, norm)
        normed.copy_(rows)

    alone = []
    for x in inputs:
        residual.copy_(x)
        normed.copy_(norm(residual))
        for layer in layers:
            products, expert_weights = layer._products(normed, normed)
            torch.cuda.synchronize()
            sum_experts(products, expert_weights, normed, residual, norm)
            torch.cuda.synchronize()
        alone.append(normed.clone())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(5):
        for x, expected in zip(inputs, alone, strict=True):
            residual.copy_(x)
            graph.replay()
            assert torch.equal(normed, expected)
