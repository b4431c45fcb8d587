"""Schedulers for tests."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from radixkv.runtime.assemble import open_scheduler
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.scheduler.scheduler import Scheduler, SchedulerLimits


def make_scheduler(cache: PageCache, **settings: Any) -> Scheduler:
    """Makes a scheduler with the fields of ``SchedulerLimits`` and the other arguments of ``open_scheduler``."""
    limits = {field.name: settings.pop(field.name) for field in fields(SchedulerLimits) if field.name in settings}
    return open_scheduler(cache, SchedulerLimits(**limits), **settings)
