from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv.llm import LLM
from support.quick_opening import quick_opening


@pytest.fixture(autouse=True, scope="module")
def _opens_quickly() -> Iterator[None]:
    with quick_opening():
        yield


@pytest.fixture(scope="module")
def llm(sensitive: Path) -> Iterator[LLM]:
    with LLM(sensitive, max_total_tokens=4096, max_model_len=1024) as llm:
        yield llm
