"""Checkpoints and recorded logits for tests that compare bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from radixkv.checkpoints import Checkpoint, resolve
from support.cases import rest_nightly
from support.checkpoints import save_checkpoint
from support.cold_answers import MODELS
from support.cpu_server import Logits, recorded_logits
from support.quick_opening import opens_quickly as opens_quickly


@pytest.fixture(scope="module", params=rest_nightly(MODELS, kept=(1,)))
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Checkpoint:
    """Each of the models in turn. The plain one, which other modules use, has its turn only at night."""
    path = tmp_path_factory.mktemp("model")
    save_checkpoint(path, **MODELS[request.param])
    return resolve(str(path))


@pytest.fixture
def logits() -> Iterator[Logits]:
    """The logits of all tokens that the test samples."""
    with recorded_logits() as seen:
        yield seen
