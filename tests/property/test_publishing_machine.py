"""Random histories whose events give exactly the computed pages of each tier, also after losses and late starts."""

from __future__ import annotations

from support.cases import examples
from support.publishing_machine import PublishingMachine

PublishingMachine.TestCase.settings = examples(80, stateful_step_count=50)
TestPublishingMachine = PublishingMachine.TestCase
