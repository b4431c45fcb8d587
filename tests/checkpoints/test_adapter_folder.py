"""Folders of adapters: what is read of them, their digest, and what is refused by name."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixkv.checkpoints.adapters import AdapterFolder, LoraShape
from radixkv.errors import CheckpointError
from support.adapters import Entry, Sizes, adapter_tensors, layer_modules, tensor_entry, write_adapter

_Q = "model.layers.0.self_attn.q_proj"


def _open(folder: Path, max_rank: int = 64) -> AdapterFolder:
    return AdapterFolder.open(folder, max_rank=max_rank)


def _refusal(folder: Path, max_rank: int = 64) -> str:
    with pytest.raises(CheckpointError) as caught:
        _open(folder, max_rank)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_modules_have_ranks_sizes_and_scales(tmp_path: Path) -> None:
    modules = layer_modules("self_attn.q_proj") | {"model.layers.1.mlp.down_proj": Sizes(2, 48, 32)}
    folder = _open(
        write_adapter(
            tmp_path,
            modules,
            target_modules=["q_proj", "down_proj"],
            rank_pattern={"down_proj": 2},
            alpha_pattern={r"layers\.1\.self_attn\..*": 12},
        )
    )
    assert folder.modules == {
        _Q: LoraShape(4, 8, 6, 2.0),
        "model.layers.1.self_attn.q_proj": LoraShape(4, 8, 6, 3.0),
        "model.layers.1.mlp.down_proj": LoraShape(2, 48, 32, 4.0),
    }
    assert folder.base_model == "org/base"
    assert folder.invocation_tokens is None


def test_rank_stabilized_scales_divide_by_the_root_of_the_rank(tmp_path: Path) -> None:
    folder = _open(write_adapter(tmp_path, use_rslora=True, lora_alpha=5))
    assert {shape.scale for shape in folder.modules.values()} == {5 / math.sqrt(4)}


def test_invocation_tokens(tmp_path: Path) -> None:
    assert _open(write_adapter(tmp_path, alora_invocation_tokens=[7, 3, 7])).invocation_tokens == (7, 3, 7)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_matrices_are_those_of_the_file(tmp_path: Path, dtype: str) -> None:
    folder = _open(write_adapter(tmp_path, dtype=dtype))
    tensors = adapter_tensors(layer_modules("self_attn.q_proj", "self_attn.v_proj"), dtype)
    for module in folder.modules:
        for half, matrix in zip("AB", folder.stored(module), strict=True):
            stored = tensors[f"base_model.model.{module}.lora_{half}.weight"]
            assert (matrix.dtype, matrix.shape, bytes(matrix.content)) == stored


def test_a_file_beyond_memory_is_refused(tmp_path: Path) -> None:
    """The file has holes, which take no room on disk."""
    path, entries, begin = write_adapter(tmp_path) / "adapter_model.safetensors", {}, 0
    for half, shape in (("A", (4, 1 << 32)), ("B", (6, 4))):
        end = begin + 4 * math.prod(shape)
        name = f"base_model.model.{_Q}.lora_{half}.weight"
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": (begin, end)}
        begin = end
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + begin)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (32 << 30, limits[1]))
    try:
        assert "for which there is no memory" in _refusal(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_names_may_have_the_name_of_the_adapter(tmp_path: Path) -> None:
    """As PEFT's releases before 0.3 saved them."""
    tensors = adapter_tensors({_Q: Sizes(4, 8, 6)})
    renamed = {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}
    assert list(_open(write_adapter(tmp_path, {}, extra=renamed)).modules) == [_Q]
    assert "twice" in _refusal(write_adapter(tmp_path, {}, extra=tensors | renamed))


def test_tensors_are_of_the_digested_bytes(tmp_path: Path) -> None:
    """A file that is written anew after it was opened changes neither the digest nor the tensors."""
    folder = _open(write_adapter(tmp_path))
    digest, values = folder.digest, bytes(folder.stored(_Q)[0].content)
    path = tmp_path / "adapter_model.safetensors"
    with path.open("r+b") as file:
        file.seek(-4 * (4 * 8 + 6 * 4) * 4, os.SEEK_END)
        file.write(bytes(16))
    assert bytes(folder.stored(_Q)[0].content) == values
    assert _open(tmp_path).digest != digest


class TestDigest:
    def test_ignores_names_times_and_fields_of_training(self, tmp_path: Path) -> None:
        one = write_adapter(tmp_path / "one")
        other = tmp_path / "other"
        shutil.copytree(one, other)
        os.utime(other / "adapter_model.safetensors", (1, 1))
        (other / "README.md").write_text("another")
        assert _open(one).digest == _open(other).digest
        write_adapter(
            other,
            lora_dropout=0.5,
            base_model_name_or_path="elsewhere/base",
            peft_version="0.9",
            target_modules=["v_proj", "q_proj", "o_proj"],
            task_type=None,
        )
        assert _open(one).digest == _open(other).digest

    @pytest.mark.parametrize(
        "changes",
        [
            {"lora_alpha": 9},
            {"use_rslora": True},
            {"alpha_pattern": {"q_proj": 3}},
            {"alora_invocation_tokens": [1]},
            {"dtype": "F16"},
        ],
        ids=str,
    )
    def test_differs_where_outputs_do(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        one, other = write_adapter(tmp_path / "one"), write_adapter(tmp_path / "other", **changes)
        assert _open(one).digest != _open(other).digest

    def test_depends_on_the_order_of_patterns(self, tmp_path: Path) -> None:
        """The first pattern that matches decides."""
        patterns = {"q_proj": 1, ".*_proj": 2}
        one = write_adapter(tmp_path / "one", alpha_pattern=patterns)
        other = write_adapter(tmp_path / "other", alpha_pattern=dict(reversed(patterns.items())))
        assert _open(one).digest != _open(other).digest

    def test_depends_on_every_byte_of_the_tensors(self, tmp_path: Path) -> None:
        digests = {_open(write_adapter(tmp_path)).digest}
        path = tmp_path / "adapter_model.safetensors"
        content = path.read_bytes()
        first = 8 + int.from_bytes(content[:8], "little")
        for position in range(first, len(content), 37):
            path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
            digests.add(_open(tmp_path).digest)
        assert len(digests) == 1 + len(range(first, len(content), 37))

    def test_depends_on_the_tokens_and_their_order(self, tmp_path: Path) -> None:
        digests = {
            _open(write_adapter(tmp_path, alora_invocation_tokens=tokens)).digest
            for tokens in (None, [1, 2], [2, 1], [12], [1, 2, 1])
        }
        assert len(digests) == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "ADALORA"),
        ("peft_type", None),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("trainable_token_indices", [1, 2]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 1}),
        ("velora_config", {"num_groups": 64}),
        ("monteclora_config", {"monteclora_n": 8}),
        ("megatron_config", {"num_layers": 2}),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", 1),
        ("init_lora_weights", ["gaussian"]),
        ("invocation_string", "<check>"),
        ("use_the_newest_variant", True),
        ("r", 0),
        ("r", True),
        ("r", "4"),
        ("r", None),
        ("lora_alpha", None),
        ("lora_alpha", True),
        ("lora_alpha", math.nan),
        ("lora_alpha", math.inf),
        pytest.param("lora_alpha", 10**400, id="lora_alpha-huge"),
        ("use_rslora", "yes"),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": -1}),
        ("rank_pattern", {"(": 4}),
        ("alpha_pattern", {"q_proj": "8"}),
        ("alpha_pattern", {"*": 8}),
        ("target_modules", None),
        ("target_modules", "(q_proj"),
        ("target_modules", {"q_proj": 1}),
        ("target_modules", [1]),
        ("exclude_modules", "("),
        ("exclude_modules", [None]),
        ("layers_to_transform", "0"),
        ("layers_to_transform", [0.5]),
        ("alora_invocation_tokens", []),
        ("alora_invocation_tokens", "12"),
        ("alora_invocation_tokens", [-1]),
        ("alora_invocation_tokens", [True]),
        ("base_model_name_or_path", 3),
    ],
    ids=str,
)
def test_fields_are_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    message = _refusal(write_adapter(tmp_path, **{field: value}))
    assert f"adapter_config.json: {field} is " in message
    assert ";" in message, "it says what to do"


@pytest.mark.parametrize(
    "changes",
    [
        {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0, "tau": 0.99}},
        {"init_lora_weights": "mica"},
        {"fan_in_fan_out": True},  # of merging only
        {"loftq_config": {"loftq_bits": 4}},  # PEFT ignores it with another initialization
        {"modules_to_save": []},
        {"a_new_feature": None, "another": False, "a_third": {}},
    ],
    ids=str,
)
def test_fields_without_effect_are_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    plain = _open(write_adapter(tmp_path / "plain"))
    assert _open(write_adapter(tmp_path / "changed", **changes)).digest == plain.digest


def test_an_old_configuration_has_few_fields(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    old = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(old))
    folder = _open(tmp_path)
    assert len(folder.modules) == 4
    assert folder.base_model is None


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("base_model.model.model.embed_tokens.weight", (4, 4), "an embedding"),
        ("base_model.model.lm_head.weight", (4, 4), "an output head"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 4), "an adapted embedding"),
        (f"base_model.model.{_Q}.lora_magnitude_vector", (6,), "DoRA's magnitudes"),
        (f"base_model.model.{_Q}.lora_B.bias", (6,), "a bias"),
        (f"base_model.model.{_Q}.base_layer.weight", (6, 8), "something else"),
        (f"base_model.model.{_Q}.lora_C.weight", (6, 8), "something else"),
        (f"{_Q}.lora_A.weight", (4, 8), "something else"),
    ],
)
def test_tensors_beside_pairs_are_refused(tmp_path: Path, name: str, shape: tuple[int, ...], kind: str) -> None:
    message = _refusal(write_adapter(tmp_path, extra={name: tensor_entry(shape)}))
    assert f"tensor {name} is {kind}" in message


@pytest.mark.parametrize("half", ["A", "B"])
def test_missing_halves_are_refused(tmp_path: Path, half: str) -> None:
    message = _refusal(write_adapter(tmp_path, without=(f"base_model.model.{_Q}.lora_{half}.weight",)))
    assert f"module {_Q} has no lora_{half}" in message


def test_an_adapter_without_tensors_is_refused(tmp_path: Path) -> None:
    assert "has no tensors" in _refusal(write_adapter(tmp_path, {}))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((4, 8), (6, 3)),
        ((4, 8), (6,)),
        ((32,), (6, 4)),
        ((4, 8, 1, 1), (6, 4, 1, 1)),
        ((0, 8), (6, 0)),
        ((4, 0), (6, 4)),
    ],
    ids=str,
)
def test_shapes_that_are_no_pair_are_refused(tmp_path: Path, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    tensors = {f"base_model.model.{_Q}.lora_A.weight": a, f"base_model.model.{_Q}.lora_B.weight": b}
    entries = {name: tensor_entry(shape) for name, shape in tensors.items()}
    message = _refusal(write_adapter(tmp_path, {}, extra=entries))
    assert _Q in message
    assert str(list(a)) in message
    assert str(list(b)) in message


def test_ranks_that_differ_from_the_configuration_are_refused(tmp_path: Path) -> None:
    assert f"{_Q} rank 5, but its tensors have rank 4" in _refusal(write_adapter(tmp_path, r=5))
    write_adapter(tmp_path, rank_pattern={"layers.1.self_attn.v_proj": 2})
    assert "layers.1.self_attn.v_proj rank 2, but its tensors have rank 4" in _refusal(tmp_path)


def test_ranks_above_the_limits_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    assert len(_open(tmp_path, max_rank=4).modules) == 4
    assert "rank 4, above the limit of 3; raise --max-lora-rank" in _refusal(tmp_path, max_rank=3)
    for rank in (128, 129):
        write_adapter(tmp_path, {_Q: Sizes(rank, 8, 6)}, r=rank)
        if rank == 128:
            _open(tmp_path, max_rank=128)
        else:
            assert "ranks to 128" in _refusal(tmp_path, max_rank=1024)


def test_tensors_that_the_configuration_leaves_out_are_refused(tmp_path: Path) -> None:
    """PEFT would ignore them."""
    assert "leave out model.layers.0.self_attn.v_proj" in _refusal(
        write_adapter(tmp_path, target_modules=["q_proj"])
    )
    assert "leave out model.layers.1." in _refusal(write_adapter(tmp_path, layers_to_transform=[0]))
    assert "leave out model.layers.0." in _refusal(write_adapter(tmp_path, exclude_modules=r".*layers\.0\..*"))


def test_layers_to_transform_needs_a_list_of_targets(tmp_path: Path) -> None:
    message = _refusal(write_adapter(tmp_path, target_modules="all-linear", layers_to_transform=[0, 1]))
    assert "layers_to_transform is [0, 1]; it needs a list of target_modules" in message


@pytest.mark.parametrize("dtype", ["F64", "I8", "F8_E4M3"])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: str) -> None:
    entry = Entry(dtype, (4, 8), bytes(32 * (8 if dtype == "F64" else 1)))
    message = _refusal(write_adapter(tmp_path, {}, extra={f"base_model.model.{_Q}.lora_A.weight": entry}))
    assert "F32, F16, BF16" in message


class TestFiles:
    def test_no_folder(self, tmp_path: Path) -> None:
        assert "absent is no folder; give the folder" in _refusal(tmp_path / "absent")

    def test_a_name_that_is_too_long(self, tmp_path: Path) -> None:
        assert "aa cannot be read: File name too long; give the folder" in _refusal(tmp_path / ("a" * 300))

    @pytest.mark.parametrize("name", ["outer", "adapter_config.json"])
    def test_no_permission(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        """The user of the tests may have all permissions, so they are denied here."""
        folder = tmp_path / "outer" / "adapter"
        folder.mkdir(parents=True)
        write_adapter(folder)
        stat = Path.stat

        def denied(path: Path, **options: bool) -> os.stat_result:
            if path.name == name or path.parent.name == name:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return stat(path, **options)

        monkeypatch.setattr(Path, "stat", denied)
        message = _refusal(folder)
        assert "Permission denied" in message
        assert "fetch" not in message

    def test_no_configuration(self, tmp_path: Path) -> None:
        (write_adapter(tmp_path) / "adapter_config.json").unlink()
        assert "has no adapter_config.json" in _refusal(tmp_path)

    @pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"r": 1e999999'])
    def test_damaged_configuration(self, tmp_path: Path, text: str) -> None:
        (write_adapter(tmp_path) / "adapter_config.json").write_text(text)
        assert "adapter_config.json" in _refusal(tmp_path)

    def test_a_configuration_that_takes_long_to_parse(self, tmp_path: Path) -> None:
        write_adapter(tmp_path, revision="x" * 1_000_000)
        assert "adapter_config.json has more than 1000000 characters" in _refusal(tmp_path)

    def test_no_tensors(self, tmp_path: Path) -> None:
        (write_adapter(tmp_path) / "adapter_model.safetensors").unlink()
        assert "has no adapter_model.safetensors" in _refusal(tmp_path)

    def test_a_pickle(self, tmp_path: Path) -> None:
        path = write_adapter(tmp_path) / "adapter_model.safetensors"
        path.rename(path.with_suffix(".bin"))
        assert "a pickle, which is never read; load it with PEFT and save it" in _refusal(tmp_path)

    @pytest.mark.parametrize(
        "name", ["adapter_model-00001-of-00002.safetensors", "adapter_model.safetensors.index.json"]
    )
    def test_several_files(self, tmp_path: Path, name: str) -> None:
        path = write_adapter(tmp_path) / "adapter_model.safetensors"
        path.rename(path.with_name(name))
        assert f"has {name}, but no adapter_model.safetensors; adapters in several files" in _refusal(tmp_path)

    def test_a_pipe(self, tmp_path: Path) -> None:
        path = write_adapter(tmp_path) / "adapter_model.safetensors"
        path.unlink()
        os.mkfifo(path)
        assert "not a regular file" in _refusal(tmp_path)

    def test_links_are_followed(self, tmp_path: Path) -> None:
        """As in the cache of huggingface_hub."""
        stored = write_adapter(tmp_path / "stored")
        linked = tmp_path / "linked"
        linked.mkdir()
        for path in stored.iterdir():
            (linked / path.name).symlink_to(path)
        assert _open(linked).digest == _open(stored).digest


class TestForBase:
    """``for_base`` of a base with two layers that have ``q_proj`` and ``v_proj``, of 8 inputs and 6 outputs."""

    @staticmethod
    def _shapes(layers: str) -> dict[str, tuple[int, ...]]:
        return {f"{layers}{layer}.self_attn.{end}": (6, 8) for layer in range(2) for end in ("q_proj", "v_proj")}

    @pytest.mark.parametrize(
        "served", ["model.layers.", "model.language_model.layers.", "model.decoder.layers.", "backbone.layers."]
    )
    @pytest.mark.parametrize("wrapper", ["model.", "model.language_model.", "language_model.model.", ""])
    def test_names_become_those_of_the_base(self, tmp_path: Path, served: str, wrapper: str) -> None:
        own = "decoder.layers." if "decoder" in served else "layers."
        modules = layer_modules("self_attn.q_proj", "self_attn.v_proj", layers=f"{wrapper}{own}")
        folder = _open(write_adapter(tmp_path, modules))
        fitted = folder.for_base(served, self._shapes(served))
        assert fitted.modules.keys() == self._shapes(served).keys()
        assert fitted.digest == folder.digest
        values = {name: bytes(folder.stored(name)[0].content) for name in modules}
        assert [bytes(fitted.stored(name)[0].content) for name in fitted.modules] == list(values.values())

    def test_other_modules_are_refused(self, tmp_path: Path) -> None:
        folder = _open(write_adapter(tmp_path, layer_modules("self_attn.q_proj", "self_attn.v_proj", n_layers=3)))
        with pytest.raises(CheckpointError, match=r"adapts model\.layers\.2\.self_attn.*with 'org/base'"):
            folder.for_base("model.layers.", self._shapes("model.layers."))

    def test_vision_is_refused(self, tmp_path: Path) -> None:
        modules = layer_modules("self_attn.q_proj", "self_attn.v_proj", layers="model.language_model.layers.")
        modules["model.visual.blocks.0.attn.q_proj"] = Sizes(4, 8, 6)
        folder = _open(write_adapter(tmp_path, modules))
        with pytest.raises(CheckpointError, match=r"it adapts model\.visual\.blocks\.0\.attn\.q_proj"):
            folder.for_base("model.language_model.layers.", self._shapes("model.language_model.layers."))

    def test_other_sizes_are_refused(self, tmp_path: Path) -> None:
        modules = layer_modules("self_attn.q_proj", "self_attn.v_proj") | {_Q: Sizes(4, 8, 12)}
        folder = _open(write_adapter(tmp_path, modules))
        with pytest.raises(CheckpointError, match=r"8 inputs and 12 outputs, but .* has 8 and 6"):
            folder.for_base("model.layers.", self._shapes("model.layers."))

    def test_missing_pairs_are_refused(self, tmp_path: Path) -> None:
        modules = layer_modules("self_attn.q_proj", "self_attn.v_proj")
        del modules[_Q]
        folder = _open(write_adapter(tmp_path, modules))
        with pytest.raises(CheckpointError, match=f"names {_Q}, of which it has no tensors"):
            folder.for_base("model.layers.", self._shapes("model.layers."))

    def test_modules_that_the_configuration_leaves_out_need_no_pair(self, tmp_path: Path) -> None:
        folder = _open(write_adapter(tmp_path, layer_modules("self_attn.q_proj"), target_modules=["q_proj"]))
        assert len(folder.for_base("model.layers.", self._shapes("model.layers.")).modules) == 2

    def test_targets_are_matched_with_the_names_of_training(self, tmp_path: Path) -> None:
        modules = layer_modules("self_attn.q_proj", layers="language_model.model.layers.", n_layers=1)
        pattern = r"language_model\.model\.layers\.0\.self_attn\.[qv]_proj"
        folder = _open(write_adapter(tmp_path, modules, target_modules=pattern))
        with pytest.raises(CheckpointError, match=r"names model\.layers\.0\.self_attn\.v_proj, of which it has no"):
            folder.for_base("model.layers.", self._shapes("model.layers."))

    def test_names_of_two_models_are_refused(self, tmp_path: Path) -> None:
        modules = layer_modules("self_attn.q_proj", "self_attn.v_proj") | {
            "layers.0.self_attn.q_proj": Sizes(4, 8, 6)
        }
        folder = _open(write_adapter(tmp_path, modules))
        with pytest.raises(CheckpointError, match="names of several models"):
            folder.for_base("model.layers.", self._shapes("model.layers."))


def test_values_are_not_checked(tmp_path: Path) -> None:
    values = np.full((4, 8), np.nan, np.float32)
    entry = Entry("F32", (4, 8), values.tobytes())
    folder = _open(write_adapter(tmp_path, extra={f"base_model.model.{_Q}.lora_A.weight": entry}))
    assert bytes(folder.stored(_Q)[0].content) == values.tobytes()
