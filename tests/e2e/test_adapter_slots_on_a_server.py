"""A server with more adapters than its steps can have answers with each as with one alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from radixkv.checkpoints import resolve
from support.device_support import load_oracle
from support.live import LiveServer, serving, wait_for
from support.lora import linear_modules, save_adapter

NAMES = ("sql", "law", "math")
SETTINGS = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PROMPT = "Question: Ann has 3 apples and buys 4. How many has she?\nAnswer:"


def answer(server: LiveServer, model: str | None) -> list[int]:
    reply: Any = server.complete(prompt=PROMPT, **SETTINGS, **({} if model is None else {"model": model}))
    return reply["choices"][0]["token_ids"]


@pytest.mark.nightly
def test_three_adapters_share_one_slot(sensitive: Path, tmp_path: Path) -> None:
    oracle = load_oracle(resolve(str(sensitive)))
    modules = linear_modules(oracle)
    paths = [f"{name}={save_adapter(tmp_path / name, oracle, modules, seed=n)}" for n, name in enumerate(NAMES)]
    flags = ("--lora-modules", *paths, "--max-loras", "1", "--max-cpu-loras", "3")
    with serving(sensitive, tmp_path / "errors", *flags) as server:
        models = (None, *NAMES)
        expected = {}
        for model in models:
            server.flush_cache()
            expected[model] = answer(server, model)
        assert len({str(tokens) for tokens in expected.values()}) == 4
        assert server.metric("lora_slot_loads_total") == 3
        server.flush_cache()
        asked = [models[index % 4] for index in range(24)]
        with ThreadPoolExecutor(24) as clients:
            found = list(clients.map(lambda model: answer(server, model), asked))
        assert found == [expected[model] for model in asked]
        wait_for(server.is_idle, "pages or requests are left")
        assert server.metrics("loras_loaded", "loras_in_slots", "lora_requests_waiting") == [3, 1, 0]
        assert 5 <= server.metric("lora_slot_loads_total") <= 3 + 18
