"""The GPUs that the Ray Serve application asks for, by the flags of its servers."""

from __future__ import annotations

import pytest

from radixkv.errors import ConfigError
from radixkv.ray_serve.server_gpus import check_gpus, gpus_of_ranks


@pytest.mark.parametrize(
    ("flags", "n_gpus"),
    [
        ("", 0),
        ("--model tiny --host-memory 1GiB", 0),
        ("some/model --tensor-parallel-size 2", 2),
        ("-tp 4 --served-model-name one other --api-key-file /a", 4),
        ("--tp-size=2 --dp=1", 2),
        ("--device cuda --tp 1", 0),
        ("--device cuda --tp 2 --unknown-flag 5", 2),
        ("--device=cpu --tp 2", 0),
    ],
)
def test_ranks_take_a_gpu_each(flags, n_gpus):
    assert gpus_of_ranks(flags.split()) == n_gpus


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data-parallel-size 2", "data_parallel_size 2 is not for servers behind Ray Serve"),
        ("-dp 3", "data_parallel_size 3 "),
        ("--tensor-parallel-size two", "'two'"),
    ],
)
def test_what_has_no_place_behind_ray_is_refused_by_name(flags, message):
    with pytest.raises(ConfigError, match=message):
        gpus_of_ranks(flags.split())


@pytest.mark.parametrize(("flags", "n_given"), [("-tp 2", 2), ("-tp 2 --device cpu", 0), ("", 1), ("-tp 1", 0)])
def test_gpus_that_fit_are_taken(flags, n_given):
    check_gpus(flags.split(), n_given)


@pytest.mark.parametrize("n_given", [0, 1, 3])
def test_other_numbers_of_gpus_than_ranks_are_refused(n_given):
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size 2 needs 2 GPUs.* {n_given};"):
        check_gpus(["--tensor-parallel-size", "2"], n_given)
