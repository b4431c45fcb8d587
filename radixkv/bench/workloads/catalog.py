"""Workloads: a TOML file names a kind and its parameters, and the kind makes the texts."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from radixkv.bench.session import Request, Session, lone
from radixkv.bench.workloads.agents import Agents
from radixkv.bench.workloads.chat import Chat
from radixkv.bench.workloads.fewshot import FewShot
from radixkv.bench.workloads.judge import Judge
from radixkv.bench.workloads.long_document_qa import LongDocumentQA
from radixkv.bench.workloads.multiturn import MultiTurn
from radixkv.bench.workloads.self_consistency import SelfConsistency
from radixkv.bench.workloads.trace import Trace
from radixkv.bench.workloads.tree_of_thought import TreeOfThought
from radixkv.bench.workloads.unshared import Unshared
from radixkv.errors import ConfigError, shortened

Workload = (
    FewShot
    | MultiTurn
    | Unshared
    | Chat
    | Agents
    | TreeOfThought
    | SelfConsistency
    | Judge
    | LongDocumentQA
    | Trace
)
"""Every kind."""

_KINDS: dict[Any, type[Workload]] = {kind.__struct_config__.tag: kind for kind in get_args(Workload)}


class WorkloadChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What a command line sets differently; None keeps the file's value."""

    num_prompts: int | None = None
    num_sessions: int | None = None
    num_turns: int | None = None
    num_shots: int | None = None
    num_samples: int | None = None
    num_documents: int | None = None
    num_questions: int | None = None
    num_facts: int | None = None
    width: int | None = None
    depth: int | None = None
    beam: int | None = None
    output_len: int | None = None
    block_len: int | None = None
    max_context: int | None = None
    too_long: Literal["skip", "scale"] | None = None
    max_concurrency: int | None = None


def load_workload(name: str, changes: WorkloadChanges | None = None) -> Workload:
    """The workload of that name among those shipped, or in the TOML file at that path.

    Raises:
        ConfigError: no such workload, a file that is not one, or a change of what its kind does not have.
    """
    try:
        table = tomllib.loads(_text(name))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"workload {name!r} is not TOML: {error}") from None
    if "kind" not in table:
        raise ConfigError(f'workload {name!r} has no kind; write kind = "fewshot"')
    kind = _KINDS.get(table["kind"]) if isinstance(table["kind"], str) else None
    if kind is None:
        raise ConfigError(f"workload {name!r} has kind {shortened(table['kind'])}; use one of {', '.join(_KINDS)}")
    _check_settings(name, kind, table.keys() - {"kind"})
    try:
        workload = msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"workload {name!r}: {_worded(error, kind, table)}") from None
    except ConfigError as error:
        raise ConfigError(f"workload {name!r}: {error}") from None
    given = {} if changes is None else {k: v for k, v in msgspec.structs.asdict(changes).items() if v is not None}
    _check_settings(name, kind, given)
    return msgspec.structs.replace(workload, **given)


def workload_names() -> list[str]:
    """The workloads that are shipped."""
    return sorted(entry.name[: -len(".toml")] for entry in _shipped().iterdir() if entry.name.endswith(".toml"))


def warmup_sessions(count: int, seed: int, n_words: int = 200, output_len: int = 32) -> list[Session]:
    """Texts that share no page with any workload, for the first requests of a fresh server."""
    rng = Random(seed)
    texts = (
        " ".join("".join(rng.choices(ascii_lowercase, k=rng.randint(2, 9))) for _ in range(n_words))
        for _ in range(count)
    )
    return [lone(Request(text, output_len)) for text in texts]


def _check_settings(name: str, kind: type[Workload], settings: Iterable[str]) -> None:
    for setting in sorted(settings):
        if setting not in kind.__struct_fields__:
            raise ConfigError(f"workload {name!r} has no {setting}; it has {', '.join(kind.__struct_fields__)}")


def _worded(error: msgspec.ValidationError, kind: type[Workload], table: dict[str, Any]) -> str:
    """Which setting is wrong, what it is and what it must be."""
    place = re.search(r"`\$\.(\w+)", str(error))
    if place is None:
        return str(error)
    hint = get_type_hints(kind)[place[1]]
    must = "a whole number"
    if get_origin(hint) is Literal:
        must = " or ".join(f'"{value}"' for value in get_args(hint))
    return f"{place[1]} is {shortened(table[place[1]])}; it must be {must}"


def _text(name: str) -> str:
    if name.endswith(".toml") or "/" in name:
        try:
            return Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read the workload {name}: {error.strerror}") from None
    if name not in workload_names():
        raise ConfigError(
            f"workload {name!r} is unknown; use one of {', '.join(workload_names())}, or the path of a TOML file"
        )
    return (_shipped() / f"{name}.toml").read_text(encoding="utf-8")


def _shipped() -> Traversable:
    """The folder of workloads: inside an installed package, beside the package in a checkout."""
    packaged = resources.files("radixkv") / "workloads"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "workloads"
