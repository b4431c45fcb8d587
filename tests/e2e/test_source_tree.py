"""A source tree that is not installed runs as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from radixkv import __version__
from support.live import LIMIT_S, serving
from support.paths import ROOT


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the source tree for started processes, which find all packages but no installed radixkv."""
    tree, packages = tmp_path / "tree", tmp_path / "packages"
    for name in ("radixkv", "workloads"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "radixkv" not in entry.name:
            (packages / entry.name).symlink_to(entry)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tree, packages))))
    return tree


@pytest.mark.nightly
def test_a_source_tree_serves_and_knows_its_version(tree: Path, sensitive: Path, tmp_path: Path) -> None:
    # Without -S, the interpreter would find the installed radixkv, too.
    with serving(sensitive, tmp_path / "errors", entry=(sys.executable, "-S", "-m", "radixkv.cli")) as live:
        assert live.http.get("/version").json() == {"version": __version__}


def test_a_source_tree_has_its_workloads(tree: Path, tmp_path: Path) -> None:
    script = (
        "import radixkv; from radixkv.lab.bench.workloads.catalog import workload_names; "
        "print(radixkv.__file__, *workload_names())"
    )
    command = [sys.executable, "-S", "-c", script]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    file, *names = found.stdout.split()
    assert Path(file) == tree / "radixkv" / "__init__.py"
    assert names == sorted(path.stem for path in (ROOT / "workloads").glob("*.toml"))
