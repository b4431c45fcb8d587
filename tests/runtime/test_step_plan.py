"""What a step plan refuses."""

from __future__ import annotations

import pytest

from radixkv.errors import InvariantError
from radixkv.runtime.step.plan import StepPlan


def test_a_plan_whose_copies_depend_on_their_order_is_refused() -> None:
    assert StepPlan(0, (), copies=((1, 2), (1, 3))).copies
    with pytest.raises(InvariantError, match=r"\[2\]"):
        StepPlan(0, (), copies=((1, 2), (2, 3)))
