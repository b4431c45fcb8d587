"""Counts the structure of the product: lines by folder, what a plain chat enters, and how far each branch reaches.

Prints tables, and appends one JSON line to ``--output-file``. Four counts:

* lines of code, lines of docstrings and files by folder. Blank lines and comments are neither.
* files and functions of ``radixkv`` that one streamed chat of ``CHAT_TOKENS`` tokens enters in a server without
  flags, by folder, over both processes. A line of a file counts whether or not it ran.
* Python calls of one turn of the engine's loop that decodes one plain request: the median over the turns of an
  answer, in ``radixkv`` alone, and without the device.
* for each branch (``BRANCHES``) the modules of runtime and tree outside its own files that import it, and those
  that use a name with one of its words; and how often one of these names is compared with None.

Names are read from the syntax tree, so prose does not count. Run it from the repository's root:

    PYTHONPATH=. python bench/structure.py --output-file bench/results/structure.jsonl
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

import httpx
from result_lines import append, script_parser

import radixkv
from radixkv import LLM, SamplingParams
from radixkv.lab.bench.environment import provenance

PACKAGE = Path(radixkv.__file__).parent
CHAT_TOKENS = 8
START_TIMEOUT_S = 120.0
POLL_S = 0.05
"""Between two looks of a server's process for the files that begin and end the recording."""


class Branch(NamedTuple):
    """A feature: its own files, and the words of its names elsewhere."""

    files: tuple[str, ...]
    """Prefixes of paths below ``radixkv``."""
    words: str
    """Regular expression that an identifier of the feature contains."""


BRANCHES: Mapping[str, Branch] = {
    "tenants": Branch(("runtime/tenants/",), r"tenant|Tenant|FairQueue|RowShares"),
    "beams": Branch(("runtime/beams/",), r"[Bb]eam"),
    "tiers": Branch(
        ("runtime/tiers/",), r"[Tt]ransfers|MemoryTiers|uses_tiers|[Dd]isk|[Ll]oading|\bhost\b|_host\b"
    ),
    "structured": Branch(("runtime/structured/",), r"[Gg]rammar|[Mm]atcher|structured|[Cc]ompil"),
    "sessions": Branch(("runtime/lifetimes/",), r"[Ss]ession|Turn\b"),
    "pins": Branch(("runtime/lifetimes/",), r"\b_?[Pp]in|_pin|Pin"),
    "events": Branch(("runtime/events/",), r"EventLog|event_log|KvEvents|kv_events|\b_?events\b"),
    "reporting": Branch(("runtime/reporting/",), r"[Ss]tats\b|StepCounters|CacheCommands|slot_use|TableUse"),
}
"""The names of the protocols in ``runtime/protocols/``, such as ``Tiers`` and ``Shares``, are the trunk's own."""
TRUNK = ("runtime/", "tree/")
"""Where a branch's reach is counted; the device has none of them."""
DEVICE = "runtime/device/"
CLASSES = {
    "fields of Request": ("runtime/request.py", "Request"),
    "arguments of Scheduler": ("runtime/scheduler/scheduler.py", "Scheduler"),
    "arguments of Loop": ("runtime/loop.py", "Loop"),
    "methods of PageCache": ("runtime/cache/cache.py", "PageCache"),
}

RECORDER = """
import json, os, sys, threading, time
from pathlib import Path

folder, package = Path(os.environ["STRUCTURE_FOLDER"]), os.environ["STRUCTURE_PACKAGE"]
entered = set()

def note(frame, event, _):
    if event == "call":
        code = frame.f_code
        if code.co_filename.startswith(package):
            entered.add((code.co_filename, code.co_firstlineno))

def watch():
    while not (folder / "begin").exists():
        time.sleep({poll})
    entered.clear()
    (folder / f"{{os.getpid()}}.begun").touch()
    while not (folder / "end").exists():
        time.sleep({poll})
    (folder / f"{{os.getpid()}}.part").write_text(json.dumps(sorted(entered)))
    os.rename(folder / f"{{os.getpid()}}.part", folder / f"{{os.getpid()}}.json")

threading.setprofile(note)
threading.Thread(target=watch, daemon=True).start()
sys.setprofile(note)
"""
"""The ``sitecustomize`` of the server's processes: notes the functions entered between the making of two files."""


def main() -> None:
    parser = script_parser(__doc__)
    arguments = parser.parse_args()
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    lines = count_lines(sources)
    print_lines(lines)
    sizes = {name: size_of_class(sources[path], class_name) for name, (path, class_name) in CLASSES.items()}
    print("\n".join(f"{name}: {size}" for name, size in sizes.items()), end="\n\n")
    reach = {name: reach_of(branch, sources) for name, branch in BRANCHES.items()}
    print_reach(reach)
    chat = chat_entries()
    print_chat(chat, sources)
    calls = calls_of_a_turn()
    print(f"Python calls of a turn: {calls['radixkv']}, without the device {calls['radixkv without the device']}")
    line = {
        "lines": lines,
        "sizes": sizes,
        "reach": reach,
        "chat": summary_of_chat(chat, sources),
        "calls_a_turn": calls,
        **provenance(),
    }
    append(arguments.output_file, line)


def folder_of(path: str) -> str:
    """Returns the folder of a path below the package, at most two deep; a file at the top is its own."""
    parts = path.split("/")
    return "/".join(parts[:2]) + "/" if len(parts) > 2 else parts[0] + "/" if len(parts) == 2 else parts[0]


def count_lines(sources: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Counts lines of code, lines of docstrings and files by folder, and of all."""
    counted: dict[str, Counter[str]] = {}
    for path, source in sources.items():
        n_docstring = len(docstring_lines(source))
        n_code = len(code_lines(source)) - n_docstring
        for folder in (folder_of(path), "all"):
            counted.setdefault(folder, Counter()).update(code=n_code, docstrings=n_docstring, files=1)
    return {folder: dict(counts) for folder, counts in counted.items()}


def code_lines(source: str) -> set[int]:
    """Returns the lines that have a token which is no comment."""
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def docstring_lines(source: str) -> set[int]:
    """Returns the lines of texts that stand alone as statements: docstrings, also those of attributes."""
    return {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def size_of_class(source: str, name: str) -> int:
    """Returns how many methods ``PageCache`` has, or how many constructor arguments or fields another class has."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            if name == "PageCache":
                return len(methods)
            for method in methods:
                if method.name == "__init__":
                    return len(method.args.args) + len(method.args.kwonlyargs) - 1
            return sum(isinstance(one, ast.AnnAssign) for one in node.body)
    raise SystemExit(f"there is no class {name}")


def reach_of(branch: Branch, sources: Mapping[str, str]) -> dict[str, Any]:
    """Returns which modules of the trunk import a branch, which use its names, and how often one is compared with
    None."""
    words = re.compile(branch.words)
    own = {module_of(path) for path in sources if path.startswith(branch.files)}
    importing, using, n_none = [], [], 0
    for path, source in sources.items():
        if not path.startswith(TRUNK) or path.startswith((*branch.files, DEVICE)):
            continue
        tree = ast.parse(source)
        if any(is_of(module, own) for module in imported_modules(tree)):
            importing.append(path)
        if any(words.search(name) for name in identifiers(tree)):
            using.append(path)
        n_none += sum(words.search(name) is not None for name in compared_with_none(tree))
    return {"imported by": importing, "names used by": using, "compared with None": n_none}


def module_of(path: str) -> str:
    return "radixkv." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def is_of(module: str, own: set[str]) -> bool:
    return module in own or module.rpartition(".")[0] in own


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Yields what a module imports, with the names that it takes from packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yields the names that a module uses or gives."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


def compared_with_none(tree: ast.AST) -> Iterator[str]:
    """Yields the last name of each expression that is compared with None."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            right = node.comparators[0]
            if isinstance(right, ast.Constant) and right.value is None:
                if isinstance(node.left, ast.Name):
                    yield node.left.id
                elif isinstance(node.left, ast.Attribute):
                    yield node.left.attr


def chat_entries() -> dict[str, list[int]]:
    """Streams a chat from a server of ``tiny``; returns the first lines of the functions entered, by path."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(RECORDER.format(poll=POLL_S))
        environment = os.environ | {
            "STRUCTURE_FOLDER": name,
            "STRUCTURE_PACKAGE": str(PACKAGE),
            "PYTHONPATH": os.pathsep.join([name, str(PACKAGE.parent)]),
        }
        command = [sys.executable, "-m", "radixkv.cli", "serve", "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
            try:
                assert server.stdout is not None
                url = re.search(r"http://\S+", server.stdout.readline())
                assert url is not None, "the server did not start"
                stream_chat(url[0], 2)  # what only the first chat does
                (folder / "begin").touch()
                wait_for(folder, "*.begun", 2)
                stream_chat(url[0], CHAT_TOKENS)
                (folder / "end").touch()
                wait_for(folder, "*.json", 2)
            finally:
                server.send_signal(signal.SIGTERM)
        entered: dict[str, set[int]] = {}
        for path in folder.glob("*.json"):
            for filename, line in json.loads(path.read_text()):
                entered.setdefault(str(Path(filename).relative_to(PACKAGE)), set()).add(line)
    return {path: sorted(lines) for path, lines in sorted(entered.items())}


def wait_for(folder: Path, pattern: str, n_files: int) -> None:
    """Waits until the server's processes have made their files."""
    end = time.monotonic() + START_TIMEOUT_S
    while len(list(folder.glob(pattern))) < n_files:
        assert time.monotonic() < end, f"fewer than {n_files} processes made {pattern}"
        time.sleep(POLL_S)


def stream_chat(url: str, n_tokens: int) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is 41 plus 11?"}],
        "max_tokens": n_tokens,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=START_TIMEOUT_S) as reply:
        assert "[DONE]" in "".join(reply.iter_text())


def summary_of_chat(chat: Mapping[str, list[int]], sources: Mapping[str, str]) -> dict[str, Any]:
    """Returns files, their lines and functions entered: of all, by folder, and by branch."""
    folders: dict[str, Counter[str]] = {}
    for path, functions in chat.items():
        for folder in (folder_of(path), "all"):
            n_lines = sources[path].count("\n")
            folders.setdefault(folder, Counter()).update(files=1, lines=n_lines, functions=len(functions))
    branches = {name: [path for path in chat if path.startswith(branch.files)] for name, branch in BRANCHES.items()}
    return {"folders": {name: dict(counts) for name, counts in folders.items()}, "branches": branches}


def calls_of_a_turn() -> dict[str, float]:
    """Returns the median number of Python calls in ``radixkv`` of a turn that decodes one plain request, without
    drafts."""
    llm = LLM("tiny", kv_cache_memory_bytes=64 << 20, grammar_backend="none", speculative_config="off")
    turns: list[Counter[str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(str(PACKAGE)):
            return
        path = str(Path(path).relative_to(PACKAGE))
        if path == "runtime/loop.py" and frame.f_code.co_name == "turn":
            turns.append(Counter())
        if turns:
            turns[-1]["radixkv"] += 1
            turns[-1]["radixkv without the device"] += not path.startswith(DEVICE)

    sampling = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    llm.generate("The capital", sampling, use_tqdm=False)
    sys.setprofile(note)
    llm.generate("The colour", sampling, use_tqdm=False)
    sys.setprofile(None)
    llm.shutdown()
    return {name: median(turn[name] for turn in turns[8:-8]) for name in ("radixkv", "radixkv without the device")}


def print_lines(lines: Mapping[str, Mapping[str, int]]) -> None:
    print(f"{'folder':28} {'code':>7} {'docstrings':>10} {'files':>6}")
    for folder, counts in lines.items():
        print(f"{folder:28} {counts['code']:7} {counts['docstrings']:10} {counts['files']:6}")
    print()


def print_reach(reach: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"{'branch':12} {'imported by':>12} {'names used by':>14} {'with None':>10}")
    for name, counts in reach.items():
        n_none = counts["compared with None"]
        print(f"{name:12} {len(counts['imported by']):12} {len(counts['names used by']):14} {n_none:10}")
    print()


def print_chat(chat: Mapping[str, list[int]], sources: Mapping[str, str]) -> None:
    summary = summary_of_chat(chat, sources)
    print(f"{'entered by a chat':28} {'files':>6} {'lines':>7} {'functions':>10}")
    for folder, counts in summary["folders"].items():
        print(f"{folder:28} {counts['files']:6} {counts['lines']:7} {counts['functions']:10}")
    for name, paths in summary["branches"].items():
        if paths:
            print(f"  of {name}: {', '.join(paths)}")
    print()


if __name__ == "__main__":
    main()
