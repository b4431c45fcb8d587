"""Kernels fit the shared memory of GPUs that are not here: they are compiled for them."""

from __future__ import annotations

import pytest
from kernel_support import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixkv.runtime.device.cuda.kernels import linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
]
SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 120: 101_376}
"""That a block of threads may have, by compute capability."""


@pytest.mark.parametrize("target", SHARED_BYTES)
@pytest.mark.parametrize("n_out", [4096, 128_256])
def test_products_of_few_rows_fit(n_out: int, target: int) -> None:
    kernel = linear._multiply_thin
    tile = linear.thin_tile(n_out, has_room=SHARED_BYTES[target] >= 160_000)
    constants = {"ROWS": tile.rows, "COLUMNS": tile.columns, "STAGES": tile.n_stages, "OVERLAP": target >= 90}
    kinds = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "n_x": "i32", "n_out": "i32", "n_in": "i32"}
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else kinds[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in kinds if name != "n_x"},
    )
    options = {"num_warps": tile.n_warps} | ({"launch_pdl": True} if target >= 90 else {})
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    assert compiled.metadata.shared <= SHARED_BYTES[target]
