"""The files of deploy/ that start servers agree with the server's flags, paths, port and key."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from radixkv.cli.serve import add as add_serve
from radixkv.frontend.http.auth import OPEN_PATHS
from support.flags import command
from support.paths import ROOT

DEPLOY = ROOT / "deploy"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVE = yaml.safe_load((DEPLOY / "ray" / "serve.yaml").read_text())


def kubernetes(name: str, kind: str) -> dict[str, Any]:
    """Returns the only object of a kind in a file."""
    documents = yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


def container() -> dict[str, Any]:
    (only,) = kubernetes("radixkv.yaml", "StatefulSet")["spec"]["template"]["spec"]["containers"]
    return only


def instruction(name: str) -> list[str]:
    """Returns the words of the last instruction of this name in the Containerfile."""
    return json.loads(re.findall(rf"^{name} (\[.*\])$", CONTAINERFILE, re.MULTILINE)[-1])


def entry_flags() -> list[str]:
    program, serve, *flags = instruction("ENTRYPOINT")
    assert (program, serve) == ("radixkv", "serve")
    return flags


@pytest.mark.parametrize(
    "flags",
    [
        [*entry_flags(), *instruction("CMD")],
        [*entry_flags(), *COMPOSE["services"]["server-1"]["command"]],
        [*entry_flags(), *container()["args"]],
        SERVE["applications"][0]["args"]["flags"],
    ],
)
def test_flags_are_those_of_the_server(flags: list[str]) -> None:
    command(add_serve, "serve", *flags)


def test_ports_agree() -> None:
    port = int(entry_flags()[entry_flags().index("--port") + 1])
    assert f"EXPOSE {port}\n" in CONTAINERFILE
    assert container()["ports"] == [{"name": "http", "containerPort": port}]
    assert kubernetes("radixkv.yaml", "Service")["spec"]["ports"][0]["port"] == port
    (smg,) = kubernetes("smg.yaml", "Deployment")["spec"]["template"]["spec"]["containers"]
    assert smg["args"][smg["args"].index("--service-discovery-port") + 1] == str(port)
    healthcheck = COMPOSE["services"]["server-1"]["healthcheck"]["test"][-1]
    assert f":{port}/" in healthcheck
    assert COMPOSE["services"]["router"]["command"][-1].count(f":{port}") == 2


def test_health_is_asked_at_paths_that_need_no_key() -> None:
    asked = [container()[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe")]
    healthcheck = COMPOSE["services"]["server-1"]["healthcheck"]["test"][-1]
    asked += re.findall(r"http://127\.0\.0\.1:\d+(/\w+)", healthcheck)
    assert set(asked) == {"/health", "/ready"}
    assert set(asked) <= OPEN_PATHS


def test_servers_and_router_select_the_same_pods_and_have_one_key() -> None:
    spec = kubernetes("radixkv.yaml", "StatefulSet")["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == kubernetes("radixkv.yaml", "Service")["spec"]["selector"] == labels
    (smg,) = kubernetes("smg.yaml", "Deployment")["spec"]["template"]["spec"]["containers"]
    assert smg["args"][smg["args"].index("--selector") + 1] == "".join(f"{k}={v}" for k, v in labels.items())
    [key] = [variable for variable in container()["env"] if variable["name"] == "RADIXKV_API_KEY"]
    assert key in smg["env"]
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] >= 30 + 5


def test_what_the_containerfile_copies_exists_and_is_what_the_wheel_needs() -> None:
    copied = re.findall(r"^COPY (?!--)(.*)$", CONTAINERFILE, re.MULTILINE)
    sources = {source for line in copied for source in line.split()[:-1]}
    assert sources == {"pyproject.toml", "README.md", "LICENSE", "radixkv", "workloads"}
    assert all((ROOT / source).exists() for source in sources)


def test_the_application_of_ray_exists() -> None:
    module, _, name = SERVE["applications"][0]["import_path"].partition(":")
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    assert f"\ndef {name}(" in source
    assert {deployment["name"] for deployment in SERVE["applications"][0]["deployments"]} <= set(
        re.findall(r'name="(\w+)"', source)
    )
