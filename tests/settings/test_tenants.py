"""A file of tenants: what it says, and how what cannot be is refused in one line that contains no key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from radixkv.cli.serve import add as add_serve
from radixkv.cli.serve import server_config
from radixkv.errors import ConfigError
from radixkv.settings.config import EngineConfig, SchedulerConfig
from radixkv.settings.server_config import ServerConfig
from radixkv.settings.tenants import TenantConfig, check_tenants, read_tenants
from support.flags import command, refused

GOOD = """
[[tenants]]
name = "search"
keys = ["sesame-1", "sesame-2"]
weight = 2
priority_range = [-1, 5]
cache_salt = "tenant"
min_row_share = 0.25
max_row_share = 0.5
min_page_share = 0.2
max_page_share = 0.6

[[tenants]]
name = "open"
keys = ["sesame-3"]
cache_salt = "request"
"""

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str) -> str:
        (tmp_path / "tenants.toml").write_text(text)
        return str(tmp_path / "tenants.toml")

    return write_file


def tenant(name: str = "a", keys: str = '["sesame"]', **settings: object) -> str:
    lines = "".join(f"{setting} = {value}\n" for setting, value in settings.items())
    return f'[[tenants]]\nname = "{name}"\nkeys = {keys}\n{lines}'


def test_a_file_gives_tenants_and_their_keys(write: Write) -> None:
    tenants = read_tenants(write(GOOD))
    search = TenantConfig("search", 2, (-1, 5), "tenant", 0.25, 0.5, 0.2, 0.6)
    assert tenants.configs == (search, TenantConfig("open", cache_salt="request"))
    assert tenants.names == {"sesame-1": "search", "sesame-2": "search", "sesame-3": "open"}
    assert "sesame" not in repr(tenants)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (tenant("a") + tenant("b"), "tenants 'a' and 'b' have the same key; give each its own"),
        (tenant(keys='["sesame", "sesame"]'), "tenant 'a' has one of its keys twice"),
        (tenant("a") + tenant("a", '["sesame-2"]'), "two tenants have the name 'a'"),
        (tenant(weigth=2), "tenant 'a': 'weigth' is no setting; there are keys, name, weight, "),
        (tenant() + "[limits]\n", "'limits' is unknown"),
        ("", "it lists no tenant"),
        ("tenants = []", "it lists no tenant"),
        ('tenants = ["a"]', "it lists no tenant"),
        ('[[tenants]]\nkeys = ["sesame"]', "tenant number 1 has no name"),
        (tenant(""), "tenant number 1 has no name"),
        (tenant("a b"), "name 'a b' of a tenant"),
        ("[[tenants]]\nname = 5", "name 5 of a tenant"),
        ('[[tenants]]\nname = "a"', "tenant 'a' has no keys"),
        (tenant(keys="[]"), "tenant 'a' has no keys"),
        (tenant(keys='"sesame"'), "tenant 'a' has no keys"),
        (tenant(keys='["open sesame"]'), "tenant 'a': each of keys must be 1 to 1024 visible"),
        (tenant(keys="[5]"), "tenant 'a': each of keys must be"),
        ('[[tenants]\nname = "sesame"', "is not TOML (at line 1, column 10)"),
        (tenant(weight=0), "tenant 'a': weight 0 must be a number from 0.001 to 1000"),
        (tenant(weight="nan"), "weight nan"),
        (tenant(priority_range="[1, 5]"), "tenant 'a': priority_range (1, 5) must contain 0"),
        (
            tenant(cache_salt='"none"'),
            "tenant 'a': cache_salt 'none' is unknown; use 'tenant', 'shared' or 'request'",
        ),
        (tenant(min_row_share=1.5), "min_row_share 1.5 must be"),
        (tenant(max_page_share=0), "max_page_share 0 must be"),
        (tenant(min_page_share="true"), "min_page_share True must be"),
        (tenant(min_row_share=0.5, max_row_share=0.4), "max_row_share 0.4 is below min_row_share 0.5"),
        (tenant(min_page_share=0.5, max_page_share=0.4), "max_page_share 0.4 is below min_page_share 0.5"),
        (tenant(max_page_share=0.5, cache_salt='"shared"'), "a share of pages needs cache_salt 'tenant'"),
        (
            tenant(min_page_share=0.7) + tenant("b", '["sesame-2"]', min_page_share=0.4),
            "the min_page_share of all tenants are 1.1 together",
        ),
        (
            tenant(min_row_share=1) + tenant("b", '["sesame-2"]', min_row_share=0.1),
            "the min_row_share of all tenants are 1.1 together",
        ),
        ("".join(tenant(f"t{n}", f'["k{n}"]') for n in range(1001)), "it lists 1001 tenants; at most 1000"),
    ],
)
def test_what_cannot_be_is_one_line(
    write: Write, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    args = command(add_serve, "serve", "--tenants", write(text))
    error = refused(capsys, lambda: server_config(args))
    assert "error: --tenants '" in error
    assert message in error
    assert "sesame" not in error


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin").write_bytes(b"name = '\xe4'")
    for name, message in (("missing", "cannot be read: No such file"), (".", "Is a directory"), ("latin", "TOML")):
        args = command(add_serve, "serve", "--tenants", str(tmp_path / name))
        assert message in refused(capsys, lambda args=args: server_config(args))


def test_shares_whose_decimals_are_rounded_may_be_all() -> None:
    check_tenants([TenantConfig(f"t{n}", min_page_share=0.1, min_row_share=0.1) for n in range(10)])
    check_tenants([TenantConfig(f"t{n}", min_page_share=share) for n, share in enumerate((0.7, 0.2, 0.1))])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--api-key", "sesame-2"), "api_key is also a key of tenant 'search'"),
        (("--explain-contents",), "explain_contents shows tenants what others have cached"),
        (("--priority-range=-1,1",), "priority_range is each tenant's own"),
    ],
)
def test_flags_that_contradict_tenants_are_refused(
    write: Write, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    args = command(add_serve, "serve", "--tenants", write(GOOD), *flags)
    error = refused(capsys, lambda: server_config(args))
    assert message in error
    assert "sesame" not in error


def test_tenants_have_keys_so_that_other_machines_may_connect(write: Write) -> None:
    config = server_config(command(add_serve, "serve", "--tenants", write(GOOD), "--host", "0.0.0.0"))
    assert config.needs_key
    assert not config.may_explain_contents
    assert "sesame" not in repr(config)
    assert not ServerConfig().needs_key


def test_an_engine_refuses_tenants_that_cannot_all_be_served() -> None:
    with pytest.raises(ConfigError, match="two tenants have the name"):
        EngineConfig(tenants=(TenantConfig("a"), TenantConfig("a")))
    tenants = (TenantConfig("a", min_row_share=1), TenantConfig("b"))
    with pytest.raises(ConfigError, match="leave tenant 'b' none of the 16 rows"):
        EngineConfig(scheduler=SchedulerConfig(max_num_seqs=16), tenants=tenants)
