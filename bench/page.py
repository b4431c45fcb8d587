"""Processor time that the page /ui costs a server while somebody looks.

A real server with the embedded model caches prompts, so that its tree has more nodes than the page asks for, and is
idle then. Intervals without and with a viewer, who reads ``/cache/tree/events`` as the page does, alternate. The
processor time of a process is counted in hundredths of a second.

Appends one JSON line. In percent of a core it has what frontend and runtime use without and with a viewer, medians,
and the difference of each pair of intervals, its median and its quartiles.
"""

from __future__ import annotations

import asyncio
from random import Random
from statistics import median, quantiles
from urllib.parse import urlsplit

import msgspec
from result_lines import report, script_parser
from server import processes, processor_s

from radixkv.client.http import HTTPClient
from radixkv.lab.bench.environment import provenance
from radixkv.processes.server_process import running_server

N_COMMON, N_OWN = 16, 32
"""Tokens of a prompt that others share, and its own."""
N_BEGINNINGS = 40
MAX_PROMPTS = 64
"""Of one request."""
SETTLING_S = 2.0


def main() -> None:
    parser = script_parser(__doc__, requires_output_file=True)
    parser.add_argument("--prompts", type=int, default=2000, help="cached prompts (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of intervals (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of an interval (default: %(default)s)")
    arguments = parser.parse_args()
    line = asyncio.run(measure(arguments.prompts, arguments.pairs, arguments.seconds))
    report(arguments.output_file, line, provenance())


async def measure(n_prompts: int, n_pairs: int, seconds: float) -> dict[str, object]:
    """Returns the line."""
    n_tokens = 2 * n_prompts * (N_COMMON + N_OWN)
    async with running_server(("--max-total-tokens", str(n_tokens))) as address, HTTPClient(address) as client:
        await _fill(client, n_prompts)
        pids = processes(address)
        tree = msgspec.json.decode(await client.request("GET", "/cache/tree"))["tiers"]["device"]
        pairs = []
        for _ in range(n_pairs):
            without = await _use_pct(pids, seconds)
            viewer = asyncio.create_task(_look(address))
            pairs.append((without, await _use_pct(pids, seconds)))
            viewer.cancel()
            await asyncio.wait([viewer])
    differences = [sum(after) - sum(before) for before, after in pairs]
    first, middle, last = quantiles(differences, n=4)
    return {
        "case": "one_viewer",
        "tree_pages": tree["pages"],
        "pages_not_visited": tree["pages_not_visited"],
        "nodes": len(tree["nodes"]),
        "frontend_pct": [round(median(pair[viewers][0] for pair in pairs), 2) for viewers in (0, 1)],
        "runtime_pct": [round(median(pair[viewers][1] for pair in pairs), 2) for viewers in (0, 1)],
        "difference_pct": round(middle, 2),
        "difference_quartiles_pct": [round(first, 2), round(last, 2)],
        "pairs": n_pairs,
        "seconds": seconds,
    }


async def _fill(client: HTTPClient, n_prompts: int) -> None:
    rng = Random(1)
    beginnings = [[rng.randrange(10, 3000) for _ in range(N_COMMON)] for _ in range(N_BEGINNINGS)]
    prompts = [
        beginnings[number % N_BEGINNINGS] + [rng.randrange(10, 3000) for _ in range(N_OWN)]
        for number in range(n_prompts)
    ]
    for first in range(0, n_prompts, MAX_PROMPTS):
        body = {"prompt": prompts[first : first + MAX_PROMPTS], "max_tokens": 1, "temperature": 0}
        await client.request("POST", "/v1/completions", msgspec.json.encode(body))


async def _use_pct(pids: tuple[int, int], seconds: float) -> tuple[float, float]:
    """Returns the processor time of frontend and runtime in an interval that begins after a moment."""
    await asyncio.sleep(SETTLING_S)
    before = [processor_s(f"/proc/{pid}") for pid in pids]
    await asyncio.sleep(seconds)
    frontend, runtime = (
        100 * (processor_s(f"/proc/{pid}") - start) / seconds for pid, start in zip(pids, before, strict=True)
    )
    return frontend, runtime


async def _look(address: str) -> None:
    """Reads the events of the page until it is cancelled."""
    parts = urlsplit(address)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(f"GET /cache/tree/events HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        assert b" 200 " in await reader.readline()
        while await reader.read(1 << 16):
            pass
        raise SystemExit("the stream has ended")
    finally:
        writer.close()


if __name__ == "__main__":
    main()
