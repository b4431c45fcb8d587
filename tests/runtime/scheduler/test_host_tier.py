"""Requests whose pages are in the host tier, with a fake device and a fake copier."""

from __future__ import annotations

from support.engine import Engine, prompt


def tight_engine(**settings: object) -> Engine:
    """Returns an engine whose pool holds one long request, and whose host tier holds many."""
    return Engine(n_pages=16, page_size=4, n_slots=200, **settings)  # type: ignore[arg-type]


def test_an_evicted_prompt_is_loaded() -> None:
    engine = tight_engine()
    first = engine.add(prompt(40))
    engine.run()
    engine.add(prompt(40, first=2))
    engine.run()
    again = engine.add(prompt(40))
    engine.run()
    engine.check_outputs()
    engine.check_idle()
    assert first.n_cached == 0
    assert again.n_cached == 39
    assert again.n_loaded == 20, "half of the prompt was evicted from the device"
