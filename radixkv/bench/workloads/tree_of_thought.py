"""A search that branches: several next steps of every kept line of thought, of which some are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from radixkv.bench.session import Request, Session, Turns
from radixkv.bench.workloads.answers import right_result
from radixkv.bench.workloads.parameters import Answered
from radixkv.bench.workloads.problems.layout import asked, worked
from radixkv.bench.workloads.problems.problem import Problem
from radixkv.bench.workloads.questions import problems_of
from radixkv.bench.workloads.sampled import TEMPERATURE, sampling_seed
from radixkv.bench.workloads.source import Made, Source
from radixkv.errors import ConfigError


class TreeOfThought(Answered, frozen=True, kw_only=True, tag="tree-of-thought"):
    """Tasks that share worked examples, each solved by a beam search over thoughts.

    A thought is one line of the answer. In each level every kept branch is continued ``width`` times with sampling,
    and of the new branches ``beam`` are kept: those that most samples agree on. The first level has one branch, the
    question alone. A task sends ``width * (1 + beam * (depth - 1))`` requests.
    """

    num_prompts: int = 8
    """Tasks."""
    width: int = 4
    """Continuations of a branch."""
    depth: int = 4
    """Levels."""
    beam: int = 2
    """Branches that are kept of a level, at most ``width``."""
    num_shots: int = 4
    output_len: int = 24
    """Tokens of each thought; what follows its first line is not kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beam > self.width:
            raise ConfigError(f"beam {self.beam} must be at most width {self.width}: the first level has no more")

    def make(self, source: Source) -> Made:
        """A session a task; otherwise as ``FewShot.make``."""
        count = self.num_shots + self.num_prompts
        problems, counts = problems_of(source, count, settings="num_prompts or num_shots")
        shots = worked(problems[: self.num_shots])
        rng = Random(source.seed)
        return Made(
            [self._task(shots, problem, sampling_seed(rng)) for problem in problems[self.num_shots :]], counts
        )

    def _task(self, shots: str, problem: Problem, seed: int) -> Session:
        head = shots + asked(problem)

        def turns() -> Turns:
            rng = Random(seed)
            branches = [""]
            for level in range(1, self.depth + 1):
                grown = [branch for branch in branches for _ in range(self.width)]
                replies = yield [
                    Request(
                        head + branch,
                        self.output_len,
                        temperature=TEMPERATURE,
                        seed=sampling_seed(rng),
                        is_right=right_result(problem, branch) if level == self.depth else None,
                    )
                    for branch in grown
                ]
                pairs = zip(grown, replies, strict=True)
                branches = best([branch + _first_line(reply.texts[0]) for branch, reply in pairs], self.beam)

        return Session(turns, n_requests=self.width * (1 + self.beam * (self.depth - 1)))


def best(branches: Sequence[str], count: int) -> list[str]:
    """Those that come most often, each once as long as there are others; of equally many, the first.

    The same branches in the same order give the same.
    """
    n_same = Counter(branches)
    n_before: Counter[str] = Counter()
    ranks = []
    for place, branch in enumerate(branches):
        ranks.append((n_before[branch], -n_same[branch], place))
        n_before[branch] += 1
    return [branches[place] for _, _, place in sorted(ranks)[:count]]


def _first_line(text: str) -> str:
    line, end, _ = text.partition("\n")
    return line + end
