"""Workload of beam searches over lines of reasoning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from radixkv.errors import ConfigError
from radixkv.lab.bench.session import BenchRequest, Session, Turns
from radixkv.lab.bench.workloads.arithmetic import problems_from
from radixkv.lab.bench.workloads.base import (
    TEMPERATURE,
    FixedOutputParameters,
    Source,
    WorkloadSessions,
    sampling_seed,
)
from radixkv.lab.bench.workloads.problems import Problem, question_prompt, result_check


class TreeOfThought(FixedOutputParameters, frozen=True, kw_only=True, tag="tree-of-thought"):
    """Tasks that share worked examples, each solved by a beam search over thoughts.

    A thought is one line of the answer. At each level every branch of the beam is continued ``width`` times with
    sampling, and the ``beam`` most frequent continuations form the next beam. The first level has one branch, the
    question alone. A task sends ``width * (1 + beam * (depth - 1))`` requests.
    """

    num_prompts: int = 8
    """Number of tasks."""
    width: int = 4
    """Continuations of a branch."""
    depth: int = 4
    """Number of levels."""
    beam: int = 2
    """Branches in the beam, at most ``width``."""
    num_shots: int = 4
    output_len: int = 24
    """Tokens generated for each thought; text after its first line is dropped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beam > self.width:
            raise ConfigError(
                f"beam {self.beam} must be at most width {self.width}, the number of branches after the first level"
            )

    def make(self, source: Source) -> WorkloadSessions:
        """Returns one session for each task; otherwise as ``FewShot.make``."""
        shots, problems, counts = problems_from(source, self.num_shots, self.num_prompts)
        rng = Random(source.seed)
        return WorkloadSessions([self._task(shots, problem, sampling_seed(rng)) for problem in problems], counts)

    def _task(self, shots: str, problem: Problem, seed: int) -> Session:
        head = shots + question_prompt(problem)

        def turns() -> Turns:
            rng = Random(seed)
            branches = [""]
            for level in range(1, self.depth + 1):
                parents = [branch for branch in branches for _ in range(self.width)]
                replies = yield [
                    BenchRequest(
                        head + branch,
                        self.output_len,
                        temperature=TEMPERATURE,
                        seed=sampling_seed(rng),
                        check=result_check(problem, branch) if level == self.depth else None,
                    )
                    for branch in parents
                ]
                pairs = zip(parents, replies, strict=True)
                branches = best([branch + _first_line(reply.texts[0]) for branch, reply in pairs], self.beam)

        return Session(turns, n_requests=self.width * (1 + self.beam * (self.depth - 1)))


def best(branches: Sequence[str], count: int) -> list[str]:
    """Returns the ``count`` most frequent branches.

    A branch is repeated only if there are too few different ones; ties go to the branch that appears first. The
    result depends on the branches and their order alone.
    """
    n_same = Counter(branches)
    n_before: Counter[str] = Counter()
    ranks = []
    for index, branch in enumerate(branches):
        ranks.append((n_before[branch], -n_same[branch], index))
        n_before[branch] += 1
    return [branches[index] for _, _, index in sorted(ranks)[:count]]


def _first_line(text: str) -> str:
    line, end, _ = text.partition("\n")
    return line + end
