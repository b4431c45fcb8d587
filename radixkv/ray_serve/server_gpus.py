"""The GPUs that a server needs of Ray, by its flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from radixkv.errors import ConfigError
from radixkv.settings.arguments import add_flags
from radixkv.settings.config import ModelConfig
from radixkv.settings.server_config import ServerConfig
from radixkv.settings.setting import settings_of


class _Parser(argparse.ArgumentParser):
    """A parser that raises ``ConfigError`` for wrong values."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def gpus_of_ranks(flags: Sequence[str]) -> int:
    """Returns how many GPUs a server takes with ``--tensor-parallel-size``.

    It is 0 for one rank, which takes what the deployment gives it, and for ranks on the CPU.

    Args:
        flags: of ``radixkv serve``. The server itself checks those that do not matter here.

    Raises:
        ConfigError: a value is wrong, or the server would have several replicas.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    model, server = settings_of(ModelConfig), settings_of(ServerConfig)
    for name in ("device", "tensor_parallel_size"):
        add_flags(parser, {name: model[name]})
    add_flags(parser, {"data_parallel_size": server["data_parallel_size"]})
    given, _ = parser.parse_known_args(flags)
    if given.data_parallel_size != 1:
        raise ConfigError(
            f"data_parallel_size {given.data_parallel_size} is not for servers behind Ray Serve, which has "
            "replicas itself; leave it out, and give num_replicas to the deployment Server"
        )
    return 0 if given.tensor_parallel_size == 1 or given.device == "cpu" else int(given.tensor_parallel_size)


def check_gpus(flags: Sequence[str], n_given: int) -> None:
    """Refuses a server with ranks on other GPUs than one for each.

    Args:
        flags: of ``radixkv serve``.
        n_given: GPUs that Ray gives the replica, the whole or a part of each.

    Raises:
        ConfigError: it is another number than the ranks need.
    """
    n_needed = gpus_of_ranks(flags)
    if n_needed and n_given != n_needed:
        raise ConfigError(
            f"tensor_parallel_size {n_needed} needs {n_needed} GPUs, and a replica of the deployment Server has "
            f"{n_given}; give ray_actor_options {{num_gpus: {n_needed}}} or none at all, or --device cpu"
        )
