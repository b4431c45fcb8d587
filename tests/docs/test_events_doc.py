"""The examples of docs/events.md do what the page says."""

from __future__ import annotations

import doctest
import re

from radixkv.settings.kv_events import KVEventsConfig
from radixkv.tree.node import Namespace
from radixkv.tree.radix_tree import RadixTree
from radixkv.wire.messages import pack_tokens
from support.paths import ROOT

PAGE = ROOT / "docs" / "events.md"
TEXT = PAGE.read_text()


def test_the_hashes_are_those_of_the_page_and_of_the_tree() -> None:
    failed, attempted = doctest.testfile(str(PAGE), module_relative=False)
    assert (failed, attempted > 4) == (0, True)
    example = doctest.DocTestParser().get_doctest(TEXT, {}, "events", None, None)
    doctest.DocTestRunner().run(example, clear_globs=False)
    for salt in ("", "hers"):
        tree = RadixTree(16)
        tree.changes.is_on = True
        lease = tree.lease(Namespace(salt=salt), b"")
        tree.commit(lease, pack_tokens(range(32)), [0, 1])
        tree.mark_computed(lease, 32)
        (stored,) = tree.changes.take()
        assert list(stored.digests) == example.globs["block_hashes"](range(32), cache_salt=salt)


def test_every_field_and_its_default_are_listed() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]*?)`? \| ", TEXT, re.MULTILINE))
    config = KVEventsConfig()
    for name in KVEventsConfig.__dataclass_fields__:
        default = {None: "none", "": "empty", False: "false"}.get(getattr(config, name), getattr(config, name))
        assert rows[name] == (f"{default:,}" if isinstance(default, int) else default), name
