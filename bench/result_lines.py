"""The flags and the JSON lines that the benchmarks of this folder have in common."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixkv.lab.bench.environment import provenance

STORE_PACKAGES = ("obstore", "mooncake-transfer-engine-non-cuda", "moto")
"""Clients of the stores that servers share, and a server that speaks S3."""


def script_parser(description: str | None, *, requires_output_file: bool = False) -> argparse.ArgumentParser:
    """Returns a parser with ``--output-file`` that shows a script's docstring as it is written."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output-file",
        type=Path,
        required=requires_output_file,
        metavar="FILE",
        help="append the JSON lines to this file",
    )
    return parser


def add_gpu_flags(parser: argparse.ArgumentParser, *, has_device: bool = True) -> None:
    """Adds the flags of benchmarks on a GPU.

    Args:
        parser: the script's parser.
        has_device: whether the script also runs on a CPU, with ``--device``.
    """
    parser.add_argument("--commit", help="the commit that is checked out, if there is no .git folder")
    if has_device:
        parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")


def add_setting_flag(parser: argparse.ArgumentParser) -> None:
    """Adds ``--setting NAME=VALUE``, which may occur several times; ``settings`` is a list of names and values."""
    parser.add_argument(
        "--setting",
        dest="settings",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the engine's LLM, its value in JSON",
    )


def add_beside_flag(parser: argparse.ArgumentParser) -> None:
    """Adds ``--beside``, which says what else used the machine while a benchmark ran."""
    parser.add_argument("--beside", metavar="WORDS", help="what else the machine does meanwhile, for the lines")


def about_stores(beside: str | None) -> dict[str, Any]:
    """Returns what ``provenance`` does, with the versions of the stores' packages and what runs ``beside``."""
    about: dict[str, Any] = provenance()
    for package in STORE_PACKAGES:
        try:
            about["environment"]["versions"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            about["environment"]["versions"][package] = None
    about["environment"]["beside"] = beside
    return about


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def append(path: Path | None, line: Mapping[str, Any]) -> None:
    """Appends a JSON line to the file; None: there is no file."""
    if path is not None:
        with path.open("a", encoding="utf-8") as output:
            output.write(json.dumps(line) + "\n")


def report(path: Path | None, line: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Prints a line, and appends it to the file together with ``about``, which says where it was measured."""
    print(json.dumps(line), flush=True)
    append(path, {**line, **about})
