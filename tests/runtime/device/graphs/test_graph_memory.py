"""The driver's memory of graphs, by hand."""

from __future__ import annotations

from radixkv.runtime.device.graphs.memory_size import driver_bytes

KIB = 1 << 10


def test_graphs_without_adapters() -> None:
    assert driver_bytes(3, 0, 32) == 3 * 32 * 64 * KIB
    assert driver_bytes(0, 64, 32) == 64 * 160 * KIB
    assert driver_bytes(3, 64, 32) == driver_bytes(3, 0, 32) + driver_bytes(0, 64, 32)


def test_every_other_graph_has_the_kernels_of_adapters() -> None:
    """Four products a layer have 12 more kernels: as many as a layer of a decode graph has without them."""
    assert driver_bytes(6, 0, 32, n_products=4 * 32) == (6 + 3) * 32 * 64 * KIB
    assert driver_bytes(0, 64, 32, n_products=4 * 32) == 64 * 160 * KIB + 32 * 12 * 16 * KIB
