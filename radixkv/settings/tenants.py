"""The tenants of a server: who they are, and what each may use of it."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from radixkv.errors import ConfigError, shortened
from radixkv.settings.checks import check_api_key, check_choice, check_number, check_priority_range

CacheIsolation = Literal["tenant", "shared", "request"]

MAX_TENANTS = 1000
"""Most tenants of a file; each is a label of metrics, and a queue."""
OPERATOR = ""
"""Name of the tenant that has the key of ``--api-key``. Unlike the tenants of a file, it may use all routes."""
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ROUNDING = 1e-9
"""Decimal fractions are rounded by less."""


@dataclass(frozen=True)
class TenantConfig:
    """What one tenant may use. Shares are fractions, from 0 to 1."""

    name: str
    weight: float = 1.0
    """Where tenants wait for each other, they get computed tokens in proportion to their weights."""
    priority_range: tuple[int, int] | None = None
    """Lowest and highest ``priority`` that a request may have. None: all."""
    cache_salt: CacheIsolation = "tenant"
    """With whom pages are shared. ``tenant``: with nobody else, and within the tenant by the requests' own
    ``cache_salt``; ``shared``: with all, and requests may have none; ``request``: with all who send the same."""
    min_row_share: float = 0.0
    """This share of the rows of a step is kept free for the tenant."""
    max_row_share: float = 1.0
    """The tenant never has more than this share of the rows of a step."""
    min_page_share: float = 0.0
    """Others never take the tenant's pages below this share of each tier's pages."""
    max_page_share: float = 1.0
    """The tenant never has more than this share of each tier's pages, cached ones included."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or (self.name != OPERATOR and not _NAME_PATTERN.fullmatch(self.name)):
            raise ConfigError(
                f"name {shortened(self.name)} of a tenant: use 1 to 64 letters, digits, dots, hyphens and "
                "underscores"
            )
        try:
            self._check()
        except ConfigError as error:
            raise ConfigError(f"tenant {self.name!r}: {error}") from None

    def _check(self) -> None:
        check_number(1e-3, 1e3, "a number from 0.001 to 1000", "weight", self.weight)
        check_priority_range("priority_range", self.priority_range)
        check_choice(get_args(CacheIsolation), "unknown", "cache_salt", self.cache_salt, show=repr)
        _check_shares("row", self.min_row_share, self.max_row_share)
        _check_shares("page", self.min_page_share, self.max_page_share)
        if self.has_page_share and self.cache_salt != "tenant":
            raise ConfigError(
                f"a share of pages needs cache_salt 'tenant': with {self.cache_salt!r}, cached pages belong to "
                "several tenants"
            )

    @property
    def has_page_share(self) -> bool:
        """Whether it has a floor or a cap of pages."""
        return self.min_page_share > 0 or self.max_page_share < 1

    def min_rows(self, n_rows: int) -> int:
        """Returns its floor of ``n_rows`` rows."""
        return _whole(self.min_row_share * n_rows)

    def max_rows(self, n_rows: int) -> int:
        """Returns its cap of ``n_rows`` rows, at least one."""
        return max(1, _whole(self.max_row_share * n_rows))

    def min_pages(self, n_pages: int) -> int:
        """Returns its floor of ``n_pages`` pages."""
        return _whole(self.min_page_share * n_pages)

    def max_pages(self, n_pages: int) -> int:
        """Returns its cap of ``n_pages`` pages."""
        return _whole(self.max_page_share * n_pages)

    @property
    def title(self) -> str:
        """What errors call it."""
        return "the operator" if self.name == OPERATOR else f"tenant {self.name!r}"


def _whole(number: float) -> int:
    """Rounds down, so that floors whose shares add up to 1 are never more than there is."""
    return math.floor(number + _ROUNDING)


def check_tenants(tenants: Sequence[TenantConfig]) -> None:
    """Refuses tenants of one name, and floors that cannot all be kept."""
    names = [tenant.name for tenant in tenants]
    if (twice := _first_twice(names)) is not None:
        raise ConfigError(f"two tenants have the name {twice!r}; give each its own")
    row_share, page_share = sum(t.min_row_share for t in tenants), sum(t.min_page_share for t in tenants)
    for what, share in (("row", row_share), ("page", page_share)):
        if share > 1 + _ROUNDING:
            raise ConfigError(
                f"the min_{what}_share of all tenants are {share:g} together, and cannot all be kept; "
                "lower them to 1 or less"
            )


def check_rows(tenants: Sequence[TenantConfig], n_rows: int) -> None:
    """Refuses floors of less than one of the ``n_rows`` rows of a step, and floors that leave a tenant none."""
    n_floors = sum(tenant.min_rows(n_rows) for tenant in tenants)
    for tenant in tenants:
        if tenant.min_row_share > 0 and not tenant.min_rows(n_rows):
            raise ConfigError(
                f"{tenant.title}: min_row_share {tenant.min_row_share} is less than one of the {n_rows} rows of a "
                "step; raise it or max_num_seqs, or leave it out"
            )
        if n_rows - n_floors + tenant.min_rows(n_rows) < 1:
            raise ConfigError(
                f"the min_row_share of others leave {tenant.title} none of the {n_rows} rows of a step; lower "
                "them, or raise max_num_seqs"
            )


@dataclass(frozen=True)
class Tenants:
    """The tenants of a file, and their keys."""

    configs: tuple[TenantConfig, ...] = ()
    names: dict[str, str] = field(default_factory=dict, repr=False)
    """The name of the tenant that has a key, by key."""


def read_tenants(path: str) -> Tenants:
    """Reads a file of tenants, in TOML.

    Raises:
        ConfigError: the file cannot be read or says something that cannot be. The error contains no key.
    """
    source = f"--tenants {shortened(path)}"
    try:
        content = tomllib.loads(Path(path).expanduser().read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}; give a TOML file with [[tenants]]") from None
    except (ValueError, RecursionError) as error:  # also of text that is not UTF-8
        place = re.search(r"\(at .*\)", str(error)) if isinstance(error, tomllib.TOMLDecodeError) else None
        where = f" {place[0]}" if place else ""
        raise ConfigError(f"{source} is not TOML{where}; see docs/tenants.md") from None
    try:
        return _parse(content)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _parse(content: dict[str, Any]) -> Tenants:
    if unknown := content.keys() - {"tenants"}:
        raise ConfigError(f"{shortened(min(unknown))} is unknown; a file has only [[tenants]]")
    entries = content.get("tenants")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError("it lists no tenant; begin each with a line [[tenants]]")
    if len(entries) > MAX_TENANTS:
        raise ConfigError(f"it lists {len(entries)} tenants; at most {MAX_TENANTS}")
    known = {setting.name for setting in fields(TenantConfig)}
    configs: list[TenantConfig] = []
    names: dict[str, str] = {}
    for number, entry in enumerate(entries, 1):
        if "name" not in entry or entry["name"] == OPERATOR:
            raise ConfigError(f"tenant number {number} has no name; give it one")
        if unknown := entry.keys() - known - {"keys"}:
            raise ConfigError(
                f"tenant {shortened(entry['name'])}: {shortened(min(unknown))} is no setting; there are keys, "
                f"{', '.join(setting.name for setting in fields(TenantConfig))}"
            )
        values = {name: value for name, value in entry.items() if name != "keys"}
        if isinstance(values.get("priority_range"), list):
            values["priority_range"] = tuple(values["priority_range"])
        config = TenantConfig(**values)
        configs.append(config)
        for key in _keys(config.name, entry.get("keys")):
            if key in names:
                if names[key] == config.name:
                    raise ConfigError(f"tenant {config.name!r} has one of its keys twice; list it once")
                raise ConfigError(
                    f"tenants {names[key]!r} and {config.name!r} have the same key; give each its own"
                )
            names[key] = config.name
    check_tenants(configs)
    return Tenants(tuple(configs), names)


def _keys(name: str, keys: object) -> list[str]:
    if not isinstance(keys, list) or not keys:
        raise ConfigError(f"tenant {name!r} has no keys; give it a list of at least one")
    for key in keys:
        try:
            check_api_key("each of keys", key)
        except ConfigError as error:
            raise ConfigError(f"tenant {name!r}: {error}") from None
    return keys


def _check_shares(what: str, low: float, high: float) -> None:
    check_number(0, 1, "a number from 0 to 1", f"min_{what}_share", low)
    check_number(0, 1, "a number above 0, and at most 1", f"max_{what}_share", high, excludes_low=True)
    if high < low:
        raise ConfigError(f"max_{what}_share {high} is below min_{what}_share {low}; raise one or lower the other")


def _first_twice(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
