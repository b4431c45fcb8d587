"""Loading of workloads from TOML files."""

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

from radixkv.errors import ConfigError, shortened
from radixkv.lab.bench.session import BenchRequest, Session, single_request_session
from radixkv.lab.bench.workloads.agents import Agents
from radixkv.lab.bench.workloads.chat import Chat
from radixkv.lab.bench.workloads.fewshot import FewShot
from radixkv.lab.bench.workloads.judge import Judge
from radixkv.lab.bench.workloads.long_document_qa import LongDocumentQA
from radixkv.lab.bench.workloads.multiturn import MultiTurn
from radixkv.lab.bench.workloads.pressure import Pressure
from radixkv.lab.bench.workloads.rag import Rag
from radixkv.lab.bench.workloads.self_consistency import SelfConsistency
from radixkv.lab.bench.workloads.tool_pauses import ToolPauses
from radixkv.lab.bench.workloads.trace import Trace
from radixkv.lab.bench.workloads.tree_of_thought import TreeOfThought
from radixkv.lab.bench.workloads.unshared import Unshared

Workload = (
    FewShot
    | MultiTurn
    | Pressure
    | Unshared
    | Chat
    | Agents
    | ToolPauses
    | TreeOfThought
    | SelfConsistency
    | Judge
    | LongDocumentQA
    | Rag
    | Trace
)
"""Every class of workloads; a TOML file's ``kind`` is the tag of one of them."""

_KINDS: dict[Any, type[Workload]] = {cls.__struct_config__.tag: cls for cls in get_args(Workload)}


def load_workload(name: str, **overrides: object) -> Workload:
    """Loads a workload.

    Args:
        name: name of a shipped workload, or path of a TOML file.
        overrides: parameters that replace those of the file.

    Raises:
        ConfigError: the workload is unknown, its file is invalid, or an override is no parameter of the workload.
    """
    try:
        table = tomllib.loads(_text(name))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"workload {name!r} is not TOML: {error}") from None
    if "kind" not in table:
        raise ConfigError(f'workload {name!r} has no kind; write kind = "fewshot"')
    cls = _KINDS.get(table["kind"]) if isinstance(table["kind"], str) else None
    if cls is None:
        raise ConfigError(f"workload {name!r} has kind {shortened(table['kind'])}; use one of {', '.join(_KINDS)}")
    _check_parameters(name, cls, table.keys() - {"kind"})
    try:
        workload = msgspec.convert(table, cls)
    except msgspec.ValidationError as error:
        raise ConfigError(f"workload {name!r}: {_describe(error, cls, table)}") from None
    except ConfigError as error:
        raise ConfigError(f"workload {name!r}: {error}") from None
    _check_parameters(name, cls, overrides)
    return msgspec.structs.replace(workload, **overrides)


def workload_names() -> list[str]:
    """Returns the names of the shipped workloads, sorted."""
    return sorted(entry.name[: -len(".toml")] for entry in _shipped().iterdir() if entry.name.endswith(".toml"))


def warmup_sessions(count: int, seed: int, n_words: int = 200, output_len: int = 32) -> list[Session]:
    """Returns sessions of random letters, which share no page with any workload, for the warm-up of a server."""
    rng = Random(seed)
    texts = (
        " ".join("".join(rng.choices(ascii_lowercase, k=rng.randint(2, 9))) for _ in range(n_words))
        for _ in range(count)
    )
    return [single_request_session(BenchRequest(text, output_len)) for text in texts]


def _check_parameters(name: str, cls: type[Workload], parameters: Iterable[str]) -> None:
    for parameter in sorted(parameters):
        if parameter not in cls.__struct_fields__:
            raise ConfigError(f"workload {name!r} has no {parameter}; it has {', '.join(cls.__struct_fields__)}")


def _describe(error: msgspec.ValidationError, cls: type[Workload], table: dict[str, Any]) -> str:
    """Returns which parameter is wrong, its value and what it must be."""
    match = re.search(r"`\$\.(\w+)", str(error))
    if match is None:
        return str(error)
    hint = get_type_hints(cls)[match[1]]
    expected = "a whole number"
    if get_origin(hint) is Literal:
        expected = " or ".join(f'"{value}"' for value in get_args(hint))
    return f"{match[1]} is {shortened(table[match[1]])}; it must be {expected}"


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
    """Returns the folder of shipped workloads: inside an installed package, beside the package in a checkout."""
    packaged = resources.files("radixkv") / "workloads"
    return packaged if packaged.is_dir() else Path(__file__).parents[4] / "workloads"
