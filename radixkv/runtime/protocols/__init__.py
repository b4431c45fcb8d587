"""Protocols of the branches, and null objects that stand where a branch is off (docs/decisions/0060).

A branch is a feature in a folder of its own: ``tenants`` has a ``Queue``, ``Shares`` and ``PageQuotas`` (which is
in ``cache/page_quotas.py``), ``beams`` a ``Continuation``, ``structured`` a ``Gate`` with its ``Constraint``,
``tiers`` has ``Tiers``, ``drafts`` has ``Drafts``, ``headroom`` has ``Headroom``, ``pauses`` has ``Returns``,
``lifetimes`` has ``Observer``, ``adapters`` has ``Adapters``; ``events`` and ``reporting`` look on. Three modules
hand the branches in: ``assemble``, ``open_loop``, and ``process``, which publishes the events. The device is behind
``step/executor.py``. All other modules of the runtime are the trunk: they import no branch, and no branch another.
"""
