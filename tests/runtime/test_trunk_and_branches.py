"""A feature that is off costs nothing: it is not imported, and a plain request enters none of its functions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import radixkv
from radixkv.tree.node import Namespace
from radixkv.wire.messages import PromptPin
from support.fake_grammars import FakeGrammar
from support.loop_frontend import PROMPT, Frontend

RUNTIME = Path(radixkv.__file__).parent / "runtime"
BRANCHES = ("beams", "events", "lifetimes", "reporting", "structured", "tenants", "tiers")
LIMIT_S = 120

OPENED = """
import json, sys
from radixkv import LLM
with LLM("tiny", device="cpu", max_total_tokens=256, max_num_seqs=2, {settings}) as llm:
    llm.generate(["A prompt"], use_tqdm=False)
names = [name.split(".") for name in sys.modules if name.startswith("radixkv.runtime.")]
print(json.dumps(sorted({{parts[2] for parts in names}})))
"""


@contextmanager
def entered_folders() -> Iterator[set[str]]:
    """Collects the folders of the runtime of which a function is entered in this thread."""
    folders: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(RUNTIME)):
            folders.add(Path(path).relative_to(RUNTIME).parts[0])

    sys.setprofile(note)
    try:
        yield folders
    finally:
        sys.setprofile(None)


def serve(**fields: object) -> set[str]:
    """Returns the branches that a request enters from its arrival to its end."""
    front = Frontend()
    with entered_folders() as folders:
        front.serve("a", PROMPT, **fields)  # type: ignore[arg-type]
    return folders & set(BRANCHES)


def test_a_plain_request_enters_no_branch() -> None:
    assert serve(n=2, temperature=1.0, logprobs=2, prompt_logprobs=1) == set()


@pytest.mark.parametrize(
    ("branch", "fields"),
    [
        ("beams", {"use_beam_search": True, "n": 2}),
        ("lifetimes", {"pins": (PromptPin(8, 60.0),)}),
        ("structured", {"structured_outputs": FakeGrammar().specification}),
    ],
)
def test_a_request_enters_the_branch_that_it_chooses(branch: str, fields: dict[str, object]) -> None:
    assert branch in serve(**fields)


def imported_folders(settings: str) -> set[str]:
    """Returns the branches of which a new process imports a module, for an offline engine."""
    command = [sys.executable, "-c", OPENED.format(settings=settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return set(json.loads(done.stdout.splitlines()[-1])) & set(BRANCHES)


def test_a_branch_of_the_settings_is_imported_only_where_it_is_set() -> None:
    assert not imported_folders("") & {"tenants", "tiers", "events"}


@pytest.mark.nightly
def test_a_branch_is_imported_where_it_is_set() -> None:
    assert "tiers" in imported_folders("host_memory_bytes=1 << 22")


def test_a_namespace_is_private_if_it_has_a_tenant_or_a_salt() -> None:
    assert [Namespace("a").is_private, Namespace(salt="b").is_private, Namespace().is_private] == [
        True,
        True,
        False,
    ]
