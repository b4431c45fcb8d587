"""Mutants of what tenants may use."""

from __future__ import annotations

import pytest

from radixkv.runtime.tenants.row_shares import RowShares
from radixkv.runtime.tenants.tenant_pages import TenantPages

Patch = pytest.MonkeyPatch


def count_no_page_that_is_freed(patch: Patch) -> None:
    add = TenantPages.add
    patch.setattr(TenantPages, "add", lambda self, namespace, n_pages: add(self, namespace, max(0, n_pages)))


def evict_the_pages_of_others_at_the_cap(patch: Patch) -> None:
    patch.setattr(TenantPages, "n_over_cap", lambda self, namespace, n_pages: 0)


def keep_the_row_of_a_request_that_ends(patch: Patch) -> None:
    patch.setattr(RowShares, "give_back", lambda self, tenant: None)


OF_TENANTS = (
    count_no_page_that_is_freed,
    evict_the_pages_of_others_at_the_cap,
    keep_the_row_of_a_request_that_ends,
)
