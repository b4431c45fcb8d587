"""Random histories whose events give exactly the computed pages of each tier, also after losses and late starts."""

from __future__ import annotations

from hypothesis import settings

from support.publishing_machine import PublishingMachine

PublishingMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestPublishingMachine = PublishingMachine.TestCase
