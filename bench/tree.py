"""Measures the time of the radix tree's operations and the memory of its nodes.

Appends one JSON line per case. As in the runtime's loop, the cyclic garbage collector is off and all imported
objects are frozen. Each value is the best of several runs: the mean of many calls, and the slowest single call.
Times are wall time and, as ``cpu``, processor time of the thread, which excludes other processes on the machine.

The trees for ``evict`` have one-page leaves below one root: the worst case, as all leaves are children of one node.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, NamedTuple

from result_lines import report, script_parser

from radixkv.lab.bench.environment import provenance
from radixkv.settings.config import EvictionPolicyName
from radixkv.tree.eviction_policies import open_eviction_policy
from radixkv.tree.node import Namespace
from radixkv.tree.radix_tree import RadixTree

PAGE_SIZE = 16
PAGE_BYTES = 4 * PAGE_SIZE
PROMPT_PAGES = 2048
NAMESPACE = Namespace()
GHOST_CAPACITY = 4.0
N_CLASSES = 6
"""Classes of nodes by their number of hits, in the trees of ``lfuda`` and ``adaptive``."""

Case = dict[str, Any]


class Timing(NamedTuple):
    """Time of one operation in microseconds; its fields become keys of the JSON lines."""

    us_per_op: float
    cpu_us_per_op: float
    max_us: float
    max_cpu_us: float


def measure(operation: Callable[[], object], n_calls: int) -> Timing:
    """Returns the mean of ``n_calls`` calls, and the slowest of as many more, which are timed one by one."""
    wall, cpu = time.perf_counter_ns, time.thread_time_ns
    slowest = slowest_cpu = 0
    begin, begin_cpu = wall(), cpu()
    for _ in range(n_calls):
        operation()
    mean, mean_cpu = (wall() - begin) / n_calls, (cpu() - begin_cpu) / n_calls
    for _ in range(n_calls):
        begin, begin_cpu = wall(), cpu()
        operation()
        slowest_cpu = max(slowest_cpu, cpu() - begin_cpu)
        slowest = max(slowest, wall() - begin)
    return Timing(mean / 1e3, mean_cpu / 1e3, slowest / 1e3, slowest_cpu / 1e3)


def best(runs: list[Timing]) -> Case:
    """Returns the minimum of each field over several runs."""
    return {
        name: round(min(values), 3) for name, values in zip(Timing._fields, zip(*runs, strict=True), strict=True)
    }


def insert(tree: RadixTree, tokens: bytes, first_page: int) -> None:
    """Caches tokens, like a request that is computed and finished."""
    lease = tree.lease(NAMESPACE, tokens)
    rest = tokens[4 * lease.n_tokens :]
    tree.commit(lease, rest, range(first_page, first_page + len(rest) // PAGE_BYTES))
    tree.mark_computed(lease, len(tokens) // 4)
    tree.release(lease)


def match(random: Random, n_edges: int, n_runs: int) -> Case:
    """Measures the match of a fully cached prompt of 32k tokens, on a path of ``n_edges`` edges."""
    tree = RadixTree(PAGE_SIZE)
    prompt = random.randbytes(PROMPT_PAGES * PAGE_BYTES)
    edge = len(prompt) // n_edges
    for index in range(1, n_edges):
        insert(tree, prompt[: index * edge] + random.randbytes(PAGE_BYTES), index * PROMPT_PAGES)
    insert(tree, prompt, 0)
    prompt_copy = bytes(bytearray(prompt))
    assert tree.match(NAMESPACE, prompt_copy) == PROMPT_PAGES * PAGE_SIZE
    n_nodes = 2 * n_edges - 1
    return {
        "nodes": n_nodes,
        **best([measure(lambda: tree.match(NAMESPACE, prompt_copy), 200) for _ in range(n_runs)]),
    }


def lease_commit_release(random: Random, n_runs: int) -> Case:
    """Measures a whole request with a new prompt of 32k tokens, in a tree that has other prompts already."""
    tree = RadixTree(PAGE_SIZE)
    pages = list(range(PROMPT_PAGES))

    def request() -> None:
        prompt = prompts.pop()
        lease = tree.lease(NAMESPACE, prompt)
        tree.commit(lease, prompt, pages)
        tree.mark_computed(lease, PROMPT_PAGES * PAGE_SIZE)
        tree.release(lease)

    runs = []
    for _ in range(n_runs):
        prompts = [random.randbytes(PROMPT_PAGES * PAGE_BYTES) for _ in range(40)]
        runs.append(measure(request, 20))
    return {"nodes": 40 * n_runs, **best(runs)}


def commit_one_page(random: Random, n_runs: int) -> Case:
    """Measures the commit of one page after 16k tokens, including occasional reallocations of the growing node."""
    prompt, page = random.randbytes(1024 * PAGE_BYTES), random.randbytes(PAGE_BYTES)
    runs = []
    for _ in range(n_runs):
        tree = RadixTree(PAGE_SIZE)
        lease = tree.lease(NAMESPACE, prompt)
        tree.commit(lease, prompt, range(1024))
        runs.append(measure(partial(tree.commit, lease, page, (7,)), 500))
    return {"nodes": 1, **best(runs)}


def evict(random: Random, n_nodes: int, n_runs: int, policy: EvictionPolicyName = "lru") -> Case:
    """Measures the eviction of one leaf per call, from a tree of ``n_nodes`` leaves.

    With policies that count hits, the leaves have 0 to 5 of them.
    """
    runs = []
    for _ in range(n_runs):
        gc.collect()  # frees the tree of the previous run
        tree = RadixTree(PAGE_SIZE, policy=open_eviction_policy(policy, GHOST_CAPACITY))
        for page in range(n_nodes):
            tokens = random.randbytes(PAGE_BYTES)
            insert(tree, tokens, page)
            if policy != "lru":
                for _ in range(page % N_CLASSES):
                    tree.release(tree.lease(NAMESPACE, tokens))
        runs.append(measure(partial(tree.evict, 1), min(n_nodes // 2, 100_000)))
    return {"nodes": n_nodes, **best(runs)}


def memory(random: Random, n_nodes: int) -> Case:
    """Measures the memory of a tree of evictable one-page nodes, including their tokens."""
    tracemalloc.start()
    tree = RadixTree(PAGE_SIZE)
    for page in range(n_nodes):
        insert(tree, random.randbytes(PAGE_BYTES), page)
    n_bytes, n_peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tree.n_pages_evictable == n_nodes
    return {"nodes": n_nodes, "bytes": n_bytes, "peak_bytes": n_peak_bytes}


def main() -> None:
    parser = script_parser(__doc__, requires_output_file=True)
    parser.add_argument(
        "--quick", action="store_true", help="small trees and one run, to check that the script works"
    )
    arguments = parser.parse_args()
    gc.freeze()
    gc.disable()
    random = Random(0)
    n_runs = 1 if arguments.quick else 7
    sizes = (100, 1000) if arguments.quick else (1000, 100_000, 1_000_000)
    cases: list[tuple[str, Callable[[], Case]]] = [
        ("match_one_edge", lambda: match(random, 1, n_runs)),
        ("match_32_edges", lambda: match(random, 32, n_runs)),
        ("lease_commit_release_32k", lambda: lease_commit_release(random, n_runs)),
        ("commit_one_page_at_16k", lambda: commit_one_page(random, n_runs)),
        *[("evict", lambda size=size: evict(random, size, min(n_runs, 3))) for size in sizes],
        *[
            (f"evict_{policy}", lambda size=size, policy=policy: evict(random, size, 1, policy))
            for policy in ("lfuda", "adaptive")
            for size in sizes[:2]
        ],
        ("memory", lambda: memory(random, sizes[-1])),
    ]
    settings = {"quick": arguments.quick, "gc": "off, imports frozen"}
    for name, case in cases:
        gc.collect()
        report(arguments.output_file, {"case": name, **case(), **settings, **provenance()}, {})


if __name__ == "__main__":
    main()
