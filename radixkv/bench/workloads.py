"""Workloads: a TOML file names a kind and its parameters, and the kind makes the prompts."""

from __future__ import annotations

import tomllib
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import islice
from pathlib import Path
from random import Random

import msgspec

from radixkv.bench.problems import Problem, made_problems, read_problems
from radixkv.errors import ConfigError, shortened

MOST = 1_000_000
"""Of anything that a workload counts: its prompts are all made before the first is sent."""


class FewShot(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="fewshot", forbid_unknown_fields=True
):
    """Worked examples that all prompts share, then one new question each."""

    num_prompts: int = 48
    num_shots: int = 8
    output_len: int = 32
    """Tokens of each answer; the end-of-sequence token is ignored."""
    max_concurrency: int = 8

    def __post_init__(self) -> None:
        for name, value, least in (
            ("num_prompts", self.num_prompts, 1),
            ("num_shots", self.num_shots, 0),
            ("output_len", self.output_len, 1),
            ("max_concurrency", self.max_concurrency, 1),
        ):
            if not least <= value <= MOST:
                raise ConfigError(f"{name} {shortened(value)} must be between {least} and {MOST}")

    def prompts(self, seed: int, dataset: Path | None) -> list[str]:
        """The requests' texts, in order. O(size).

        Without ``dataset`` the problems are made from ``seed``; with it, the file's first problems are the shots
        and ``seed`` changes nothing.

        Raises:
            ConfigError: the data set cannot be read, or is too short.
        """
        problems = made_problems(seed) if dataset is None else read_problems(dataset)
        needed = self.num_shots + self.num_prompts
        taken = list(islice(problems, needed))
        if len(taken) < needed:
            raise ConfigError(
                f"{dataset} has {len(taken)} problems; {self.num_prompts} prompts and {self.num_shots} shots "
                f"need {needed}; give a longer file or fewer prompts"
            )
        shots = "".join(_worked(problem) for problem in taken[: self.num_shots])
        return [f"{shots}Question: {problem.question}\nAnswer:" for problem in taken[self.num_shots :]]


Workload = FewShot
"""Every kind; a further one makes this a union."""


class WorkloadChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What a command line sets differently; None keeps the file's value."""

    num_prompts: int | None = None
    num_shots: int | None = None
    output_len: int | None = None
    max_concurrency: int | None = None


def load_workload(name: str, changes: WorkloadChanges | None = None) -> Workload:
    """The workload of that name among those shipped, or in the TOML file at that path.

    Raises:
        ConfigError: no such workload, or a file that is not one.
    """
    try:
        table = tomllib.loads(_text(name))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"workload {name!r} is not TOML: {error}") from None
    if "kind" not in table:
        raise ConfigError(f'workload {name!r} has no kind; write kind = "fewshot"')
    try:
        workload = msgspec.convert(table, Workload)
    except msgspec.ValidationError as error:
        raise ConfigError(f"workload {name!r} cannot be used: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"workload {name!r}: {error}") from None
    given = {} if changes is None else {k: v for k, v in msgspec.structs.asdict(changes).items() if v is not None}
    return msgspec.structs.replace(workload, **given)


def workload_names() -> list[str]:
    """The workloads that are shipped."""
    return sorted(entry.name[: -len(".toml")] for entry in _shipped().iterdir() if entry.name.endswith(".toml"))


def warmup_prompts(count: int, seed: int, words: int = 200) -> list[str]:
    """Texts that share no page with any workload, for the first requests of a fresh server."""
    rng = Random(seed)
    return [
        " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(words))
        for _ in range(count)
    ]


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
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "workloads"


def _worked(problem: Problem) -> str:
    return f"Question: {problem.question}\nAnswer: {problem.answer}\n\n"
