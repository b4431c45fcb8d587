"""Ages of uses in seconds, against a list of all times."""

from __future__ import annotations

from random import Random

import pytest

from radixkv.tree.use_times import UseTimes


@pytest.mark.parametrize("most_between_s", [0.01, 2.0, 300.0])
def test_a_use_is_known_to_have_been_about_so_long_ago(most_between_s: float) -> None:
    random, now, times = Random(1), 100.0, list[float]()
    uses = UseTimes(lambda: now)
    for _ in range(20_000):
        now += random.uniform(0, most_between_s)
        uses.add()
        times.append(now)
    now += 5.0
    for n_uses_ago in [0, 1, 2, *(random.randrange(len(times)) for _ in range(500)), len(times) - 1]:
        seconds = now - times[-1 - n_uses_ago]
        assert uses.seconds_since(n_uses_ago) == pytest.approx(seconds, rel=0.02, abs=0.25 + most_between_s)


def test_without_a_use_nothing_was_ever_used() -> None:
    assert UseTimes(lambda: 7.0).seconds_since(0) == 0.0
