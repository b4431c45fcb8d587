from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv.llm import LLM
from support.quick_opening import opens_quickly as opens_quickly


@pytest.fixture(scope="module")
def llm(sensitive: Path) -> Iterator[LLM]:
    with LLM(sensitive, max_total_tokens=4096, max_model_len=1024) as llm:
        yield llm
