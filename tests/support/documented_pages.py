"""The code blocks of README and docs, and a shell that runs those of one page in their order, as printed.

An HTML comment above a block, which readers do not see, says what to do with it:

- ``<!-- file: NAME -->``: it is the text of a file, which later blocks use.
- ``<!-- needs: KIND -->``: it is not run, because it needs what ``NEEDS`` lists.
- ``<!-- runs until stopped -->``: it is run until the end of the page, and must print something.

Every other block with commands, and every program in Python, runs. Ports are replaced by free ones.
``radixkv serve`` returns when the server is ready; another one on the same port takes its place.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from radixkv.checkpoints import resolve
from support.live import LIMIT_S
from support.paths import ROOT
from support.processes import has_ended

NEEDS = {
    "a GPU": "CUDA, or what only a GPU does in minutes",
    "a download": "a checkpoint from the hub, a public data set, or packages",
    "another product": "a program of other makers, or a cluster",
    "this repository": "what make does here",
    "a long run": "minutes on two cores, or the state after them",
}
PORTS = ("8000", "8001", "8002", "8003", "5557", "5558")
CLIENTS_PYTHON = ROOT / ".venv" / "clients" / "openai-3" / "bin" / "python"
"""An environment with the package of OpenAI."""
PAGE_LIMIT_S = 1800.0

COMMANDS = (
    "radixkv curl python pip make echo export mkdir smg serve docker kubectl vllm taskset git mooncake_master "
    "claude codex"
).split()
_COMMAND = re.compile(rf"^(?:\$ |(?:\. |\w+=\S+ )*(?:[\w./]+/)?(?:{'|'.join(COMMANDS)})(?:\s|$))", re.MULTILINE)
_BLOCK = re.compile(r"(?:^<!-- (.*?) -->\n)?^```([\w+-]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"(file|needs): (.+)|runs until stopped")


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    line: int
    mark: str
    """The text of the comment above it; empty without one."""
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file whose text it is."""
        return self.mark.removeprefix("file: ") if self.mark.startswith("file: ") else None

    @property
    def needs(self) -> str | None:
        """What it needs that a test does not have."""
        return self.mark.removeprefix("needs: ") if self.mark.startswith("needs: ") else None

    @property
    def is_commands(self) -> bool:
        """Whether it has commands of a shell."""
        return self.language in ("", "sh", "bash", "console") and _COMMAND.search(self.text) is not None

    @property
    def is_program(self) -> bool:
        """Whether it is a program in Python, and no session, which doctest runs."""
        return self.language == "python" and not self.text.startswith(">>>")


def blocks(page: Path) -> list[Block]:
    """Returns the code blocks of a page, in their order."""
    text = page.read_text()
    return [
        Block(text.count("\n", 0, match.start()) + 1, match[1] or "", match[2], match[3])
        for match in _BLOCK.finditer(text)
    ]


def complaint(block: Block) -> str | None:
    """Returns what is wrong with a block's mark; None: nothing is."""
    if block.mark and not _MARK.fullmatch(block.mark):
        return f"the mark {block.mark!r} is unknown"
    if block.needs is not None and block.needs not in NEEDS:
        return f"it needs {block.needs!r}, which is none of {', '.join(NEEDS)}"
    if (block.needs or block.mark.startswith("runs")) and not (block.is_commands or block.is_program):
        return "it has a mark of commands, and no command"
    return None


def is_run(block: Block) -> bool:
    """Returns whether a block is run."""
    return block.needs is None and block.file is None and (block.is_commands or block.is_program)


def run_page(page: Path, folder: Path) -> str:
    """Runs a page in a new folder; returns the output. Fails with it and the block's line if a command fails."""
    ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
    tools = folder / ".venv" / "bin"
    tools.mkdir(parents=True)
    (tools / "activate").write_text(f"PATH={shlex.quote(str(tools))}:$PATH\n")
    _tool(tools / "radixkv", sys.executable, str(Path(__file__).parent / "documented_cli.py"), ports["8000"])
    _tool(tools / "curl", shutil.which("curl") or "curl", "--fail-with-body", "--max-time", str(LIMIT_S))
    _tool(tools / "python", sys.executable)
    (folder / "my-model").symlink_to(resolve("tiny").folder)
    for name in ("deploy", "examples"):
        (folder / name).symlink_to(ROOT / name)
    script = folder / ".venv" / "page.sh"
    script.write_text(_with_ports(_script(page, folder, ports), ports))
    path = f"{tools}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "SERVERS": str(tools.parent)}
    environment.pop("RADIXKV_API_KEY", None)
    try:
        done = subprocess.run(
            ["bash", str(script)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PAGE_LIMIT_S,
        )
    finally:
        for pid_file in tools.parent.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid_file.read_text()), signal.SIGTERM)
            assert has_ended(int(pid_file.read_text())), pid_file.name
    logs = "".join(f"\n--- {log.name}\n{log.read_text()[-2000:]}" for log in tools.parent.glob("*.log"))
    assert done.returncode == 0, f"{page.name}:\n{done.stdout[-6000:]}{logs}"
    return done.stdout


def _script(page: Path, folder: Path, ports: dict[str, str]) -> str:
    """Returns a script of bash that runs the page's blocks, and writes its files."""
    lines = ["set -e -o pipefail", f"cd {shlex.quote(str(folder))}"]
    shown = blocks(page)
    run = [block for block in shown if is_run(block)]
    if not any("radixkv serve" in block.text for block in run):
        lines.append("radixkv serve")  # as README says
    for block in shown:
        if block.file is not None:
            target = folder / block.file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_with_ports(block.text, ports))
            continue
        if not is_run(block):
            continue
        lines.append(f"echo '--- {page.name}:{block.line}'")
        if block.is_program:
            name = f"program_{block.line}.py"
            (folder / name).write_text(_with_ports(block.text, ports))
            lines.append(shlex.join([str(CLIENTS_PYTHON if "openai" in block.text else sys.executable), name]))
        elif block.mark.startswith("runs"):
            command = shlex.quote("\n".join(_commands(block)))
            lines.append(f"setsid bash -c {command} > printed_{block.line} 2>&1 &")
            lines.append(f"echo $! > $SERVERS/block{block.line}.pid")
            lines.append(f"for i in $(seq 600); do [ -s printed_{block.line} ] && break; sleep 0.2; done")
            lines.append(f"cat printed_{block.line}; [ -s printed_{block.line} ]")
        else:
            lines += _commands(block)
    return "\n".join(lines) + "\n"


def _commands(block: Block) -> list[str]:
    """Returns a block's commands; those that the page shows to fail are negated."""
    if not re.search(r"^\$ ", block.text, re.MULTILINE):
        return [block.text]
    commands = []
    for match in re.finditer(r"^\$ ((?:.*\\\n)*.*)\n(radixkv [\w ]+: error: )?", block.text, re.MULTILINE):
        commands.append(f"! {match[1]}" if match[2] else match[1])
    return commands


def _with_ports(text: str, ports: dict[str, str]) -> str:
    return re.sub(rf"\b(?:{'|'.join(ports)})\b", lambda match: ports[match[0]], text)


def _tool(path: Path, *command: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o755)


def _free_ports(n_ports: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n_ports)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [str(each.getsockname()[1]) for each in sockets]
