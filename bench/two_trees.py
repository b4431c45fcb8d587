"""Token workloads through the offline ``LLM`` of two source trees or settings, in turn in one process each.

Each tree's engine is loaded once, on the same GPU. Each round runs every workload with both trees, one after the
other; the order changes from round to round. The result is the median time of each tree, and the median, minimum
and maximum of the ratios of the pairs. ``--output-file`` appends a JSON line for each workload.

    python bench/two_trees.py ../old . --commits 812d4ed,HEAD --rounds 10
    python bench/two_trees.py . . --settings '{}' '{"tensor_parallel_size": 2}'
    python bench/two_trees.py ../old . --model tiny --device cpu --rounds 20
    python bench/two_trees.py ../old . --small --device cpu --rounds 2      # tries the code
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from result_lines import report, script_parser
from token_workloads import ALL, VOCAB

if TYPE_CHECKING:
    from radixkv.processes.child_process import ChildProcess

Workloads = dict[str, tuple[str, dict[str, int]]]
WORKLOADS: Workloads = {
    "single": ("single", {}),
    "single, prompt of 2,048": ("single", {"prompt": 2048}),
    "4 rows, prompts of 512": ("decode", {"requests": 4, "prompt": 512, "output": 128}),
    "8 rows, prompts of 4,096": ("decode", {"requests": 8, "prompt": 4096, "output": 128}),
    "decode": ("decode", {"output": 128}),
    "unshared": ("unshared", {"requests": 96, "output": 16}),
    "fewshot": ("fewshot", {"requests": 256}),
    "multiturn": ("multiturn", {"sessions": 32, "turns": 3}),
}
"""Workloads of ``token_workloads`` by their names in the result, with arguments that make them short."""
SMALL_WORKLOADS: Workloads = {
    "single": ("single", {"prompt": 8, "output": 8}),
    "decode": ("decode", {"requests": 4, "prompt": 16, "output": 8}),
    "unshared": ("unshared", {"requests": 4, "prompt": 32, "output": 4}),
    "fewshot": ("fewshot", {"requests": 8, "shared": 48, "question": 8, "output": 4}),
    "multiturn": ("multiturn", {"sessions": 2, "turns": 2, "system": 32, "user": 8, "output": 4}),
}
TINY_WORKLOADS: Workloads = {
    "single": ("single", {}),
    "decode": ("decode", {"requests": 32, "output": 48}),
    "unshared": ("unshared", {"requests": 8, "output": 8}),
    "fewshot": ("fewshot", {"requests": 48, "output": 8}),
    "multiturn": ("multiturn", {"sessions": 8, "turns": 3, "output": 8}),
    "agents": ("agents", {"tasks": 4, "depth": 2, "output": 8}),
}
"""Workloads of about a second on two cores, for the embedded model."""
TINY_VOCAB = 3000
"""Ids are below this for the embedded model: its special tokens come behind."""


class Tree:
    """A worker process that runs workloads with the engine of one source tree. Use ``start`` to create one."""

    def __init__(self, process: ChildProcess) -> None:
        self._process = process
        self.close = process.close

    @classmethod
    async def start(cls, path: Path, model: Path, arguments: argparse.Namespace, more: dict[str, Any]) -> Tree:
        """Starts the worker and loads the engine."""
        from radixkv.processes.child_process import (
            ChildProcess,  # the worker imports this file too, and an older tree has none
        )

        settings: dict[str, Any] = {"device": arguments.device}
        if arguments.model != "tiny":
            settings |= {"dtype": "bfloat16", "load_format": "dummy"}
        if arguments.device == "cuda":
            settings["kv_cache_memory_bytes"] = arguments.pool_gib << 30
        settings |= more
        inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        paths = [str(path.resolve()), str(Path(__file__).parent), *inherited]
        tree = cls(
            await ChildProcess.start(
                [sys.executable, __file__, "--worker", str(model), json.dumps(settings)],
                environment=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )
        )
        package = (await tree._receive())["package"]
        if not Path(package).is_relative_to(path.resolve()):
            raise SystemExit(f"{path} was to be measured, but Python imported {package}")
        return tree

    async def run(self, workload: str, sizes: dict[str, int]) -> dict[str, Any]:
        """Returns the seconds of all phases, and a digest of the answers."""
        self._process.send_line(json.dumps([workload, sizes]).encode())
        return await self._receive()

    async def _receive(self) -> dict[str, Any]:
        line = await self._process.read_line()
        if not line:
            raise SystemExit(f"a worker ended with code {await self._process.wait()}; its error is above")
        received: dict[str, Any] = json.loads(line)
        return received


async def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--commits", default="first,second", metavar="FIRST,SECOND", help="named in the JSON lines")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--settings",
        nargs=2,
        type=json.loads,
        default=({}, {}),
        metavar=("FIRST", "SECOND"),
        help="more arguments of each engine's LLM, in JSON",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--model",
        default="llama-8b",
        metavar="NAME",
        help="the shape of the dummy weights, such as llama-8b (default), or tiny: the embedded model as it is",
    )
    parser.add_argument("--small", action="store_true", help="a small model and small workloads")
    parser.add_argument("--workloads", nargs="+", metavar="NAME", help="run these of them (default: all)")
    parser.add_argument("--pool-gib", type=int, default=24, help="KV pool of each engine on a GPU")
    arguments = parser.parse_args()

    from shapes import LABELS, MODELS, SMALL, write_model

    from gpu import gpu_provenance

    if arguments.model not in (*MODELS, "tiny"):
        parser.error(f"--model {arguments.model} is none of {', '.join(MODELS)}, tiny")
    is_tiny = arguments.model == "tiny"
    workloads = SMALL_WORKLOADS if arguments.small else TINY_WORKLOADS if is_tiny else WORKLOADS
    if arguments.workloads is not None:
        if unknown := set(arguments.workloads) - workloads.keys():
            parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(workloads)}")
        workloads = {name: workloads[name] for name in arguments.workloads}
    with tempfile.TemporaryDirectory() as folder:
        label = "small" if arguments.small else "tiny" if is_tiny else LABELS[arguments.model]
        if label == "tiny":
            model = Path("tiny")
        else:
            model = write_model(SMALL if arguments.small else MODELS[arguments.model], Path(folder))
        both = zip((arguments.first, arguments.second), arguments.settings, strict=True)
        trees = [await Tree.start(path, model, arguments, more) for path, more in both]
        for tree in trees:
            for workload, sizes in workloads.values():
                await tree.run(workload, sizes)
        pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in workloads}
        digests: dict[str, list[set[str]]] = {name: [set(), set()] for name in workloads}
        for round_ in range(arguments.rounds):
            for name, (workload, sizes) in workloads.items():
                seconds = [0.0, 0.0]
                for index in (0, 1) if round_ % 2 == 0 else (1, 0):
                    result = await trees[index].run(workload, sizes)
                    seconds[index] = result["seconds"]
                    digests[name][index].add(result["outputs_sha256"])
                pairs[name].append((seconds[0], seconds[1]))
        for tree in trees:
            await tree.close()
    about = {} if arguments.output_file is None else gpu_provenance(arguments.device)
    for name, times in pairs.items():
        line = {
            "benchmark": "two_trees",
            "workload": name,
            "model": label,
            "commits": arguments.commits.split(","),
            "settings": arguments.settings,
            "first_s": round(statistics.median(first for first, _ in times), 4),
            "second_s": round(statistics.median(second for _, second in times), 4),
            **ratios(times),
            "outputs_equal": digests[name][0] == digests[name][1],
            "pairs": [[round(first, 4), round(second, 4)] for first, second in times],
        }
        report(arguments.output_file, line, about)


def ratios(times: list[tuple[float, float]]) -> dict[str, float]:
    """The second tree's time over the first one's, pair by pair."""
    found = [second / first for first, second in times]
    return {
        "ratio_median": round(statistics.median(found), 4),
        "ratio_min": round(min(found), 4),
        "ratio_max": round(max(found), 4),
    }


def work(model: str, settings: dict[str, Any]) -> None:
    """The worker: one JSON line in for each workload, one out with its time."""
    import gc
    import hashlib
    import time

    import radixkv
    from radixkv import LLM, SamplingParams

    vocab = TINY_VOCAB if model == "tiny" else VOCAB
    llm = LLM(model, **settings)
    print(json.dumps({"package": radixkv.__file__}), flush=True)
    for line in sys.stdin:
        name, sizes = json.loads(line)
        phases = [[([one % vocab for one in ids], n) for ids, n in phase] for phase in ALL[name](**sizes)]
        llm.flush_cache()
        gc.collect()
        digest = hashlib.sha256()
        begun = time.perf_counter()
        for phase in phases:
            params = [SamplingParams(temperature=0.0, max_tokens=n_new, ignore_eos=True) for _, n_new in phase]
            for output in llm.generate([prompt for prompt, _ in phase], params, use_tqdm=False):
                digest.update(repr(output.outputs[0].token_ids).encode())
        seconds = time.perf_counter() - begun
        print(json.dumps({"seconds": seconds, "outputs_sha256": digest.hexdigest()}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], json.loads(sys.argv[3]))
    else:
        asyncio.run(main())
