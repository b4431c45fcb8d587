"""Headers of adapters' safetensors files: whatever is accepted, the library of safetensors accepts, too."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from radixkv.checkpoints.adapters.header import ITEM_BYTES, Span, read_spans
from radixkv.errors import CheckpointError
from support.adapters import Entry, adapter_tensors, layer_modules, safetensors_content, tensor_entry
from support.cases import examples


def _read(path: Path) -> dict[str, Span]:
    with path.open("rb") as file:
        return dict(read_spans(file, path.stat().st_size, path)[1])


def _with_header(header: Any, n_bytes: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(n_bytes)


def _tensor(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@st.composite
def _tensors(draw: st.DrawFn) -> dict[str, Entry]:
    names = draw(st.lists(st.text('ab.é"\\', min_size=1, max_size=5), unique=True, max_size=5))
    generator = np.random.default_rng(1)
    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    return {
        name: tensor_entry(draw(shapes), draw(st.sampled_from(sorted(ITEM_BYTES))), generator) for name in names
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("header") / "adapter_model.safetensors"


@given(tensors=_tensors())
@examples(100)
def test_spans_are_where_the_tensors_are(path: Path, tensors: dict[str, Entry]) -> None:
    content = safetensors_content(tensors)
    path.write_bytes(content)
    first = 8 + int.from_bytes(content[:8], "little")
    spans = _read(path)
    assert spans.keys() == tensors.keys()
    for name, (dtype, shape, data) in tensors.items():
        span = spans[name]
        assert (span.dtype, span.shape, content[first + span.begin : first + span.end]) == (dtype, shape, data)


@given(tensors=_tensors(), data=st.data())
@examples(400)
def test_damaged_files_are_refused_or_fit_the_library(
    path: Path, tensors: dict[str, Entry], data: st.DataObject
) -> None:
    content = bytearray(safetensors_content(tensors))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        match data.draw(st.sampled_from(["digit", "change", "cut", "grow"])):
            case "digit":
                digits = [match.start() for match in re.finditer(rb"\d", content)]
                if digits:
                    content[data.draw(st.sampled_from(digits))] = data.draw(st.sampled_from(b"0123456789"))
            case "change" if at < len(content):
                content[at] = data.draw(st.integers(0, 255))
            case "cut":
                del content[at:]
            case _:
                content += bytes(data.draw(st.integers(1, 9)))
    path.write_bytes(content)
    spans, refused = _outcome(path)
    if spans is None:
        assert refused.startswith(str(path))
        assert len(refused) < len(str(path)) + 400
        return
    with safe_open(path, framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        stored = {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
    assert stored == {name: (span.dtype, span.shape) for name, span in spans.items()}


def _outcome(path: Path) -> tuple[dict[str, Span] | None, str]:
    try:
        return _read(path), ""
    except CheckpointError as error:
        return None, str(error)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it has 0 bytes"),
        (bytes(7), "it has 7 bytes"),
        (bytes(8), "another character"),
        ((2**63).to_bytes(8, "little") + b"{}", "does not end before"),
        (_with_header(b"[]", 0), "another character"),
        (_with_header(b" {}", 0), "another character"),
        (_with_header(b"{", 0), "JSONDecodeError"),
        (_with_header(b'{"\xff": 1}', 0), "UnicodeDecodeError"),
        (_with_header(b'{"a":' * 100_000, 0), "RecursionError"),
        (_with_header(b'{"a": {"dtype": "F32", "dtype": "F32"}}', 0), "a name occurs twice"),
        (_with_header({"a": 1}, 0), "TypeError"),
        (_with_header({"a": {"dtype": "F32", "shape": [1]}}, 4), "data_offsets"),
        (_with_header({"a": _tensor(0, 4, [True])}, 4), "not integers from 0 on"),
        (_with_header({"a": _tensor(0, 4, [-1, -1])}, 4), "not integers from 0 on"),
        (_with_header({"a": {**_tensor(0, 4), "data_offsets": [0, 4, 8]}}, 4), "ValueError"),
        (_with_header({"a": {**_tensor(0, 4), "dtype": ["F32"]}}, 4), "TypeError"),
        (_with_header({"a": _tensor(0, 8, [1])}, 8), "of shape [1] and dtype F32 has 8 bytes"),
        (_with_header({"a": _tensor(8, 4, [])}, 8), "has -4 bytes"),
        (_with_header({"a": _tensor(0, 8), "b": _tensor(4, 12)}, 12), "a and b overlap"),
        (_with_header({"a": _tensor(0, 8), "b": _tensor(0, 8)}, 8), "a and b overlap"),
        (_with_header({"a": _tensor(0, 4), "b": _tensor(8, 12)}, 12), "a and b have a gap between them"),
        (_with_header({"a": _tensor(4, 8)}, 8), "a does not begin where the header ends"),
        (_with_header({"a": _tensor(0, 8)}, 4), "take 8 bytes, but 4 follow"),
        (_with_header({"a": _tensor(0, 4)}, 8), "take 4 bytes, but 8 follow"),
        (_with_header({"__metadata__": {"format": 1}}, 0), "__metadata__ is no text"),
        (_with_header({"__metadata__": "pt"}, 0), "AttributeError"),
        (_with_header({}, 8), "take 0 bytes, but 8 follow"),
    ],
)
def test_damages_are_named(path: Path, content: bytes, reason: str) -> None:
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        _read(path)


def test_a_header_that_takes_long_to_parse_is_refused_unread(tmp_path: Path) -> None:
    """No other thread runs while Python parses it."""
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(_with_header(b'{"a":[' + b"1," * 2_000_000 + b"1]}", 0))
    with pytest.raises(CheckpointError, match="has a header of 4000009 bytes; those of adapters may have 4000000"):
        _read(path)


def test_a_tensor_with_a_long_name_is_refused_without_the_name(tmp_path: Path) -> None:
    """A name is split at each of its dots: one of 200,000 dots held all streams up for seconds."""
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(_with_header({"a" + ".a" * 200_000: _tensor(0, 4)}, 4))
    with pytest.raises(CheckpointError, match="a tensor whose name has 400001 characters") as refused:
        _read(path)
    assert len(str(refused.value)) < 1000


def test_the_header_of_a_thousand_layers_is_read(tmp_path: Path) -> None:
    ends = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj")
    modules = layer_modules(*ends, "mlp.up_proj", "mlp.down_proj", n_layers=1000)
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(safetensors_content(adapter_tensors(modules)))
    assert len(_read(path)) == 14_000
