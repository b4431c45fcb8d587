from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from radixkv.checkpoints import Checkpoint, resolve
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Small random checkpoints by name, made once."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            path: Path = folder / name
            save_checkpoint(path, **CHECKPOINTS[name])
            made[name] = resolve(str(path))
        return made[name]

    return get


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower with more, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
