"""The memory that a GPU's driver takes for captured graphs."""

from __future__ import annotations

KERNELS_OF_ADAPTERS = 3
"""Most kernels that adapters add to a product: two of their own, and one that is otherwise fused with it."""
_DECODE_LAYER_BYTES = 64 << 10
"""A layer of a decode graph, for some 12 kernels."""
_DECODE_PRODUCT_BYTES = KERNELS_OF_ADAPTERS * _DECODE_LAYER_BYTES // 12
_PIECE_BYTES = 160 << 10
"""A piecewise graph, for some 10 kernels."""
_PIECE_PRODUCT_BYTES = KERNELS_OF_ADAPTERS * _PIECE_BYTES // 10


def driver_bytes(n_decode: int, n_pieces: int, n_layers: int, n_products: int = 0) -> int:
    """Estimates the driver's memory of all graphs, without what their kernels write.

    Args:
        n_decode: decode graphs.
        n_pieces: piecewise graphs, one for each layer of a number of tokens.
        n_layers: of the model.
        n_products: products of all layers that adapters may change. If there are any, every other graph is of
            steps with adapters.
    """
    n_bytes = _DECODE_LAYER_BYTES * n_layers * n_decode + _PIECE_BYTES * n_pieces
    with_adapters = _DECODE_PRODUCT_BYTES * n_products * n_decode
    with_adapters += _PIECE_PRODUCT_BYTES * n_products * n_pieces // n_layers
    return n_bytes + with_adapters // 2
