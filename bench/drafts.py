"""Measures what drafts bring where answers repeat something, and what they cost where nothing can be drafted.

An engine with dummy weights answers as recorded answers say: after a step, each sampled token is replaced by the
recorded one, so that drafts are right where the recorded answer agrees with them. Drafts are switched on and off in
one engine, and tokens are replaced in both arms alike.

A number of conversations runs at a time. When a turn is answered, the next one is submitted; after the last turn,
another conversation begins. The first conversations begin at any of their turns, with what came before in the
cache, as in a server that has run for long. A run ends after a number of answer tokens, about those that
``--seconds`` bring without drafts. Each pair begins at other conversations, and the arm that runs first alternates.

Prints a JSON line for each workload and number of rows. The ratio is that of answer tokens a second, with drafts
to without. Every answer is checked to be the recorded one as far as it has come.

| workload | answers |
|---|---|
| `taubench` | a tool-calling agent's, the trials of each task one after the other |
| `first_trials` | those of the first trial of each task |
| `extraction` | JSON that quotes a letter |
| `chats` | solutions of problems, four a chat |
| `agents` | random pieces, and pieces of the prompt |
| `random` | random: nothing to draft |

The first four are in the file of ``--tokens``, which ``tokenize`` makes. With ``--no-model`` steps compute nothing:
tokens a step of whole workloads are known soon, and the ratios are those of the host's time.

With ``--own-answers`` the model has its weights and answers workloads of ``radixkv bench``, first without drafts.
No token is replaced then: every answer is checked to be the one without drafts. With ``--cpu-time``, seconds are
those in which this process computes, for a machine that has other work.

    python bench/drafts.py tokenize --messages taubench_airline.jsonl --questions gsm8k_test.jsonl \\
        --tokenizer gpt2_tokenizer --output tokens.npz
    python bench/drafts.py --tokens tokens.npz --output-file bench/results/drafts.jsonl
    python bench/drafts.py --workloads random,agents --rows 1,256
    python bench/drafts.py --small --device cpu --seconds 1 --pairs 2 --rows 1,4      # tries the code
    python bench/drafts.py --model tiny --device cpu --tokens tokens.npz --rows 1     # the embedded model's shape
    python bench/drafts.py --no-model --device cpu --tokens tokens.npz --seconds 60 --pairs 2
    python bench/drafts.py --own-answers agents,fewshot --model tiny --device cpu --rows 1,8 --seconds 60 \\
        --speculative-config '{"method": "tree"}'
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from math import sqrt
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import recorded
from own_answers import own_answers
from recorded import Turn, Workload
from result_lines import add_gpu_flags, add_setting_flag, report, script_parser
from schedule import NullDevice
from shapes import LABELS, MODELS, SMALL, write_model

from gpu import gpu_provenance
from radixkv.checkpoints import Checkpoint, resolve
from radixkv.llm.offline_runner import paused_collector
from radixkv.runtime.device.factory import look_at_machine, resolve_config
from radixkv.runtime.device.ranks.open import open_ranks
from radixkv.runtime.device.resolved_config import ResolvedConfig
from radixkv.runtime.device.start_times import StartTimes
from radixkv.runtime.loop import Loop
from radixkv.runtime.open_loop import OpenDevice, open_loop
from radixkv.runtime.protocols.drafts import Drafts
from radixkv.runtime.step.executor import Executor
from radixkv.runtime.step.page_copier import HostMemoryCopier, SlotPart
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import LaunchedStep, SampledStep, StepResult, TokenMasks
from radixkv.settings.config import MAX_SEED, EngineConfig
from radixkv.settings.speculative import SpeculativeConfig
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.cache_messages import Flush
from radixkv.wire.messages import Cancel, Done, GetStats, Submit, Tokens, unpack_tokens
from radixkv.wire.sampling import SamplingParams
from radixkv.wire.stats import Stats

SHAPES = MODELS | {"small": SMALL}
ROWS = {"random": (1, 8, 32, 128, 256), "agents": (1, 8, 32, 128, 256), "chats": (1, 8, 32, 128, 256)}
"""Conversations at a time, where drafts must not cost anything; (1, 8, 32) where they must bring something."""
SMALL_SIZES = {
    "random": {"n": 16, "prompt": 8, "output": 12},
    "agents": {"tasks": 4, "width": 2, "depth": 2, "system": 48, "step": 16, "output": 48},
}
NULL_PAGES = 25_000
"""Pages of the pool where steps compute nothing, about those of an H100 with a model of 8B."""
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Of 97.5%, by degrees of freedom from 1 on."""

WARM_UP_S = 3.0
IsOver = Callable[[int, float, int], bool]
"""Says whether a run ends, by answer tokens, seconds and unfinished conversations so far."""
Answers = dict[int, Sequence[int]]
"""Recorded answers by the seed of their request."""


class ReplayedExecutor:
    """A device whose sampled tokens are replaced by recorded ones after each step.

    Args:
        executor: computes the steps.
        answers: recorded answers; requests with other seeds keep their tokens.
    """

    def __init__(self, executor: Executor, answers: Answers) -> None:
        self.device = executor.device
        self.n_ranks = executor.n_ranks
        self.dtype = executor.dtype
        self.kv_dtype = executor.kv_dtype
        self.n_pages = executor.n_pages
        self.vocab_size = executor.vocab_size
        self.window = executor.window
        self.has_windows = executor.has_windows
        self.adapters = executor.adapters
        self.n_states = executor.n_states
        self.window_pool = executor.window_pool
        self.uses_shared_runs = executor.uses_shared_runs
        self.is_asynchronous = executor.is_asynchronous
        self.splits_drafts = executor.splits_drafts
        self.page_origin = executor.page_origin
        self._executor = executor
        self._answers = answers

    def launch(self, plan: StepPlan) -> ReplayedStep:
        """Launches a step, and looks up the recorded tokens while it is computed."""
        launched = self._executor.launch(plan)
        tokens: list[int | None] = []
        for row in plan.rows:
            sampling, n_tokens = row.sampling, 1 + row.n_drafts
            answer = None if sampling is None else self._answers.get(sampling.seed)
            if sampling is None or answer is None:
                tokens += [None] * n_tokens
            else:
                tokens += answer[sampling.index : sampling.index + n_tokens]
        return ReplayedStep(launched, tokens)

    def open_copier(self, host_memory_bytes: int, part: SlotPart | None = None) -> HostMemoryCopier:
        """Returns the device's copier."""
        return self._executor.open_copier(host_memory_bytes, part)

    def check(self) -> None:
        """Raises ``DeviceLost`` if the device was lost."""
        self._executor.check()

    def close(self) -> None:
        """Frees the device's memory."""
        self._executor.close()


class ReplayedStep:
    """A launched step: a ``LaunchedStep``, then a ``SampledStep``.

    Args:
        launched: the device's.
        tokens: [sampled positions], the recorded ones; None keeps the sampled one.
    """

    def __init__(self, launched: LaunchedStep, tokens: Sequence[int | None]) -> None:
        self._launched = launched
        self._tokens = tokens
        self._sampled: SampledStep | None = None

    def sample(self, masks: TokenMasks | None) -> ReplayedStep:
        """Samples the step's tokens."""
        self._sampled = self._launched.sample(masks)
        return self

    @property
    def is_done(self) -> bool:
        """Whether the device has computed the step."""
        return self._sampled is not None and self._sampled.is_done

    def result(self) -> StepResult:
        """Returns the result, with the recorded tokens in place of those that were sampled."""
        assert self._sampled is not None
        result = self._sampled.result()
        pairs = zip(result.tokens, self._tokens, strict=True)
        tokens = tuple([own if own < 0 or token is None else token for own, token in pairs])
        return StepResult(tokens, result.finite, result.logprobs, result.prompt_logprobs, result.device_seconds)


class Start(NamedTuple):
    """Where a run begins."""

    workload: Workload
    """The conversations; the first ones may begin in the middle."""
    cached: Sequence[bytes]
    """Prompts of these, which are computed before the run."""


class Arm(NamedTuple):
    """What came of one run."""

    seconds: float
    n_tokens: int
    n_steps: int
    n_drafted: int
    n_accepted: int


class Engine:
    """An engine that answers as recorded, whose drafts can be switched.

    Args:
        config: its settings, with drafts.
        checkpoint: the model.
        open_device: opens the device.
        replaces: whether sampled tokens are replaced by recorded ones.
        clock: seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        open_device: OpenDevice,
        *,
        replaces: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._answers: Answers = {}
        self._clock = clock
        resolved = resolve_config(config, checkpoint, look_at_machine(config.model.device))
        if replaces:
            open_device = partial(open_replayed, open_device, self._answers)
        self.loop = open_loop(resolved, checkpoint, open_device=open_device)
        self._drafts = self.loop.scheduler.drafts

    def run(self, start: Start, n_rows: int, *, has_drafts: bool, is_over: IsOver) -> Arm:
        """Answers conversations from an empty cache.

        Args:
            start: what to answer; conversations at the end may be left out.
            n_rows: how many to answer at a time.
            has_drafts: whether rows may have drafts.
            is_over: says whether the run ends.
        """
        loop, answers = self.loop, self._answers
        loop.scheduler.drafts = self._drafts if has_drafts else Drafts()
        loop.receive(Flush("flush"))
        answers.clear()
        for number, prompt in enumerate(start.cached):
            submit(loop, f"cached {number}", prompt, n_new=1, seed=MAX_SEED)
        while loop.has_work:
            loop.turn()
        waiting = map(iter, start.workload)
        live: dict[str, Iterator[Turn]] = {}
        outputs: dict[str, bytearray] = {}

        def go_on(conversation: Iterator[Turn]) -> None:
            """Submits the next turn of a conversation, or the first one of another if there is any."""
            for turns in chain([conversation], waiting):
                if (turn := next(turns, None)) is not None:
                    seed = len(answers)
                    answers[seed] = unpack_tokens(turn.answer)
                    submit(loop, str(seed), turn.prompt, n_new=len(answers[seed]), seed=seed)
                    live[str(seed)], outputs[str(seed)] = turns, bytearray()
                    return

        gc.collect()
        before, drafted_before = stats_of(loop), self._drafts.stats()
        n_done, seconds = 0, 0.0
        with paused_collector():
            begun = self._clock()
            for _ in range(n_rows):
                go_on(next(waiting))
            while live and not is_over(n_done, seconds, len(live)):
                for message in loop.turn():
                    if isinstance(message, Tokens):
                        for item in message.items:
                            outputs[item.id] += item.tokens
                            n_done += len(item.tokens) // TOKEN_BYTES
                    else:
                        assert isinstance(message, Done), message
                        go_on(live.pop(message.id))
                seconds = self._clock() - begun
        after, drafted = stats_of(loop), self._drafts.stats()
        assert drafted_before is not None
        assert drafted is not None
        for request_id in live:
            loop.receive(Cancel(request_id))
        while loop.has_work:
            loop.turn()
        for request_id, output in outputs.items():
            answer, tokens = answers[int(request_id)], unpack_tokens(output)
            assert tokens == answer[: len(tokens) if request_id in live else None], (
                f"answer {request_id} is another"
            )
        return Arm(
            seconds,
            n_done,
            after.steps_total - before.steps_total,
            drafted.draft_tokens_total - drafted_before.draft_tokens_total,
            drafted.accepted_tokens_total - drafted_before.accepted_tokens_total,
        )


def open_replayed(
    open_device: OpenDevice, answers: Answers, resolved: ResolvedConfig, checkpoint: Checkpoint, times: StartTimes
) -> ReplayedExecutor:
    return ReplayedExecutor(open_device(resolved, checkpoint, times), answers)


def open_null(resolved: ResolvedConfig, checkpoint: Checkpoint, times: StartTimes) -> Executor:
    return NullDevice(NULL_PAGES, checkpoint.vocab_size)


def submit(loop: Loop, request_id: str, prompt: bytes, *, n_new: int, seed: int) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=n_new, ignore_eos=True, seed=seed)
    refused = loop.receive(Submit(request_id, prompt, sampling))
    assert not refused, refused


def stats_of(loop: Loop) -> Stats:
    (stats,) = loop.receive(GetStats("stats"))
    assert isinstance(stats, Stats)
    return stats


def main() -> None:
    if sys.argv[1:2] == ["tokenize"]:
        recorded.tokenize(sys.argv[2:])
        return
    arguments = parse_arguments()
    has_own = arguments.own_answers is not None
    model = arguments.model or ("tiny" if has_own else "small" if arguments.small else "llama-8b")
    config = SpeculativeConfig(**json.loads(arguments.speculative_config))
    with tempfile.TemporaryDirectory() as folder:
        if has_own:
            checkpoint = resolve(model)
        else:
            checkpoint = find_checkpoint(model, Path(folder), has_weights=not arguments.no_model)
        settings = {"device": arguments.device, "grammar_backend": "none", "speculative_config": config}
        settings |= {"model": str(checkpoint.folder), "load_format": "auto" if has_own else "dummy"}
        engine = Engine(
            EngineConfig.of(settings | dict(arguments.settings)),
            checkpoint,
            open_null if arguments.no_model else open_ranks,
            replaces=not has_own,
            clock=time.process_time if arguments.cpu_time else time.perf_counter,
        )
    ready = engine.loop.ready
    workloads = load_workloads(arguments, model, ready.vocab_size, ready.max_prompt_and_answer)
    about = {
        "model": None if arguments.no_model else LABELS.get(model, model),
        "speculative_config": str(config),
        "settings": dict(arguments.settings),
        "seconds_are": "CPU time" if arguments.cpu_time else "wall time",
        **({} if arguments.output_file is None else gpu_provenance(arguments.device, arguments.commit)),
    }
    for name, workload in workloads.items():
        for n_rows in arguments.rows or ROWS.get(name, (1, 8, 32)):
            if n_rows > min(len(workload), ready.max_num_seqs):
                print(f"{name} has {len(workload)} conversations, too few for {n_rows} at a time", flush=True)
                continue
            line = measure(engine, workload, n_rows, n_pairs=arguments.pairs, seconds=arguments.seconds)
            report(arguments.output_file, {"benchmark": "drafts", "workload": name, "rows": n_rows, **line}, about)
    engine.loop.close()


def find_checkpoint(model: str, folder: Path, *, has_weights: bool) -> Checkpoint:
    """Returns the embedded model, or writes one; without weights it is small, with the vocabulary of the other."""
    if model == "tiny":
        return resolve(model, load_format="dummy")
    shape = SHAPES[model] if has_weights else SMALL | {"vocab_size": SHAPES[model]["vocab_size"]}
    return resolve(str(write_model(shape, folder)), load_format="dummy")


def parse_arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--tokens", type=Path, metavar="FILE", help="conversations that tokenize has written")
    parser.add_argument("--workloads", metavar="NAMES", help="default: all that there are")
    parser.add_argument("--own-answers", metavar="NAMES", help="workloads of radixkv bench, or their TOML files")
    parser.add_argument("--dataset-path", type=Path, metavar="FILE", help="the data set of --own-answers")
    parser.add_argument("--cpu-time", action="store_true", help="seconds are those of this process on the CPU")
    parser.add_argument("--rows", type=_numbers, metavar="NUMBERS", help="how many conversations at a time")
    parser.add_argument("--pairs", type=int, choices=range(2, 11), default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of the arm without drafts")
    parser.add_argument("--model", choices=("tiny", *SHAPES), help="shape of the dummy weights (default: llama-8b)")
    parser.add_argument("--no-model", action="store_true", help="steps compute nothing; with --device cpu")
    parser.add_argument("--small", action="store_true", help="small random workloads, and by default a small model")
    parser.add_argument("--speculative-config", default='{"method": "ngram"}', metavar="JSON")
    add_gpu_flags(parser)
    add_setting_flag(parser)
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def load_workloads(
    arguments: argparse.Namespace, model: str, vocab_size: int, max_length: int
) -> dict[str, Workload]:
    """Returns the chosen workloads by name, as far as model and pool can hold them."""
    if arguments.own_answers is not None:
        names = arguments.own_answers.split(",")
        return own_answers(names, arguments.dataset_path, model, arguments.device)
    sizes = SMALL_SIZES if arguments.small else {"random": {}, "agents": {}}
    workloads: dict[str, Workload] = {} if arguments.tokens is None else recorded.load(arguments.tokens)
    workloads["random"] = recorded.random_answers(**sizes["random"])
    workloads["agents"] = recorded.agent_answers(sizes["agents"])
    names = list(workloads) if arguments.workloads is None else arguments.workloads.split(",")
    if unknown := set(names) - workloads.keys():
        raise SystemExit(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(workloads)}")
    return {name: recorded.fitting(workloads[name], vocab_size, max_length) for name in names}


def measure(engine: Engine, workload: Workload, n_rows: int, *, n_pairs: int, seconds: float) -> dict[str, Any]:
    """Runs the pairs of a workload and number of rows, after two runs that warm up and find out how long one is."""

    def after(limit_s: float) -> IsOver:
        return lambda n_done, passed_s, n_live: passed_s >= limit_s or n_live < n_rows

    first = start_at(workload, n_rows, 0)
    engine.run(first, n_rows, has_drafts=True, is_over=after(min(seconds, WARM_UP_S)))
    n_tokens = engine.run(first, n_rows, has_drafts=False, is_over=after(seconds)).n_tokens
    arms: dict[bool, list[Arm]] = {False: [], True: []}
    for pair in range(n_pairs):
        start = start_at(workload, n_rows, pair * len(workload) // n_pairs)
        for has_drafts in (False, True) if pair % 2 == 0 else (True, False):
            arms[has_drafts].append(
                engine.run(start, n_rows, has_drafts=has_drafts, is_over=lambda n_done, *_: n_done >= n_tokens)
            )
    off, on = arms[False], arms[True]
    pairs = [(rate([slow]), rate([fast])) for slow, fast in zip(off, on, strict=True)]
    return {
        **ratios([fast / slow for slow, fast in pairs]),
        "ratio_of_all": round(rate(on) / rate(off), 4),
        "off": summary(off),
        "on": summary(on),
        "tokens_of_a_run": n_tokens,
        "outputs_equal": True,
        "pairs": [[round(slow, 1), round(fast, 1)] for slow, fast in pairs],
    }


def start_at(workload: Workload, n_rows: int, first: int) -> Start:
    """Lets conversation ``first`` be the first one, and the first ``n_rows`` begin anywhere."""
    rng = Random(first)
    rotated = [*workload[first:], *workload[:first]]
    turns = [rng.randrange(len(conversation)) for conversation in rotated[:n_rows]]
    begun = [conversation[turn:] for conversation, turn in zip(rotated, turns, strict=False)]
    return Start(
        [*begun, *rotated[n_rows:]], [rest[0].prompt for rest, turn in zip(begun, turns, strict=True) if turn]
    )


def rate(arms: Sequence[Arm]) -> float:
    """Returns the answer tokens a second of several runs."""
    return sum(arm.n_tokens for arm in arms) / sum(arm.seconds for arm in arms)


def summary(arms: Sequence[Arm]) -> dict[str, float]:
    """Returns the figures of all runs of an arm together."""
    n_steps = sum(arm.n_steps for arm in arms)
    return {
        "tokens_per_s": round(rate(arms), 1),
        "tokens_per_step": round(sum(arm.n_tokens for arm in arms) / n_steps, 3),
        "ms_per_step": round(1e3 * sum(arm.seconds for arm in arms) / n_steps, 3),
        "steps": n_steps,
        "drafted": sum(arm.n_drafted for arm in arms),
        "accepted": sum(arm.n_accepted for arm in arms),
    }


def ratios(found: Sequence[float]) -> dict[str, float]:
    """Returns median, range and mean of the pairs' ratios, and the lower end of the 95% t-interval of the mean."""
    mean = statistics.mean(found)
    error = T_QUANTILES[len(found) - 2] * statistics.stdev(found) / sqrt(len(found))
    return {
        "ratio_median": round(statistics.median(found), 4),
        "ratio_min": round(min(found), 4),
        "ratio_max": round(max(found), 4),
        "ratio_mean": round(mean, 4),
        "ratio_low": round(mean - error, 4),
    }


if __name__ == "__main__":
    main()
