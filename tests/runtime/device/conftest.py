from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from radixkv.checkpoints import Checkpoint, resolve
from support.checkpoints import save_checkpoint
from support.device_support import CHECKPOINTS, HYBRIDS


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Returns small random checkpoints by name, each generated once per session."""
    folder = tmp_path_factory.mktemp("checkpoints")
    generated: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in generated:
            path: Path = folder / name
            save_checkpoint(path, **(CHECKPOINTS | HYBRIDS)[name])
            generated[name] = resolve(str(path))
        return generated[name]

    return get


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: more make models this small slower, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
