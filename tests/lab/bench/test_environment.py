"""Date, commit and machine of result lines."""

import datetime
import subprocess

from radixkv.lab.bench.environment import commit_of, environment, provenance


def test_uncommitted_changes_are_marked(tmp_path):
    def git(*command):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        done = subprocess.run(
            ["git", "-C", tmp_path, *identity, *command], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("1\n")
    assert commit_of(package) is None
    git("init", "-q")
    assert commit_of(package) is None  # no commit yet
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    assert commit_of(package) == commit
    (tmp_path / "results.jsonl").write_text("{}\n")  # beside the package
    assert commit_of(package) == commit
    (package / "a.py").write_text("2\n")
    assert commit_of(package) == f"{commit} with changes"
    (package / "a.py").write_text("1\n")
    (package / "b.py").write_text("new\n")
    assert commit_of(package) == f"{commit} with changes"


def test_each_gpu_model_is_named_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 570.1'\necho 'NVIDIA H200, 570.1'\n")
    tool.chmod(0o755)
    reported = environment()
    assert (reported["gpu"], reported["driver"]) == ("NVIDIA H200", "570.1")
    tool.write_text("#!/bin/sh\necho 'NVIDIA A100, 570.1'\necho 'NVIDIA H200, 570.1'\n")
    assert environment()["gpu"] == "NVIDIA A100 / NVIDIA H200"
    tool.write_text("#!/bin/sh\necho 'has failed because it could not communicate with the driver'\nexit 9\n")
    reported = environment()
    assert (reported["gpu"], reported["driver"]) == (None, None)


def test_the_date_is_in_utc():
    reported = provenance()
    assert reported.keys() == {"date", "environment"}
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(reported["date"])
    assert datetime.timedelta(0) <= age < datetime.timedelta(minutes=5)
