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
GPUS = yaml.safe_load((DEPLOY / "compose.gpus.yaml").read_text())
KUSTOMIZATION = (DEPLOY / "kubernetes" / "kustomization.yaml").read_text()
SERVE = yaml.safe_load((DEPLOY / "ray" / "serve.yaml").read_text())


def kubernetes(name: str, kind: str) -> dict[str, Any]:
    """Returns the only object of a kind in a file."""
    documents = yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


def container() -> dict[str, Any]:
    (only,) = kubernetes("radixkv.yaml", "StatefulSet")["spec"]["template"]["spec"]["containers"]
    return only


def container_with_gpus(flag: str = "--tensor-parallel-size") -> dict[str, Any]:
    """Returns the container after the patches of kustomization.yaml, with another flag for the number of GPUs."""
    kustomization = yaml.safe_load(KUSTOMIZATION)
    assert kustomization["resources"] == ["radixkv.yaml"]
    server = kubernetes("radixkv.yaml", "StatefulSet")
    for patch in kustomization["patches"]:
        assert patch["target"] == {"kind": server["kind"], "name": server["metadata"]["name"]}
        for change in yaml.safe_load(patch["patch"].replace("--tensor-parallel-size", flag)):
            *folders, name = change["path"].strip("/").split("/")
            place: Any = server
            for folder in folders:
                place = place[int(folder) if isinstance(place, list) else folder]
            if isinstance(place, list):
                assert (change["op"], name) == ("add", "-")
                place.append(change["value"])
            else:
                assert change["op"] == "replace"
                assert name in place
                place[name] = change["value"]
    (only,) = server["spec"]["template"]["spec"]["containers"]
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
        *([*entry_flags(), *service["command"]] for service in GPUS["services"].values()),
        *(
            [*entry_flags(), *container_with_gpus(flag)["args"]]
            for flag in ("--tensor-parallel-size", "--data-parallel-size")
        ),
        SERVE["applications"][0]["args"]["flags"],
    ],
)
def test_flags_are_those_of_the_server(flags: list[str]) -> None:
    command(add_serve, "serve", *flags)


def test_servers_with_several_gpus_use_all_of_them() -> None:
    """Ranks and replicas are both named, and each takes as many GPUs as the container has."""
    flags = [container_with_gpus(flag)["args"] for flag in ("--tensor-parallel-size", "--data-parallel-size")]
    limits = container_with_gpus()["resources"]["limits"]
    found = [(limits["nvidia.com/gpu"], one) for one in flags]
    for service in GPUS["services"].values():
        (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
        found.append((devices["count"], service["command"]))
    used = [command(add_serve, "serve", *one) for _, one in found]
    assert [one.tensor_parallel_size * one.data_parallel_size for one in used] == [n_gpus for n_gpus, _ in found]
    assert {(one.tensor_parallel_size, one.data_parallel_size) for one in used} == {(1, 2), (2, 1)}
    assert "--data-parallel-size=2" in KUSTOMIZATION, "what to write instead"
    for name, service in GPUS["services"].items():
        assert service["profiles"] == [name]


def test_ports_agree() -> None:
    port = int(entry_flags()[entry_flags().index("--port") + 1])
    assert f"EXPOSE {port}\n" in CONTAINERFILE
    assert container()["ports"] == [{"name": "http", "containerPort": port}]
    assert kubernetes("radixkv.yaml", "Service")["spec"]["ports"][0]["port"] == port
    (smg,) = kubernetes("smg.yaml", "Deployment")["spec"]["template"]["spec"]["containers"]
    assert smg["args"][smg["args"].index("--service-discovery-port") + 1] == str(port)
    for service in (COMPOSE["services"]["server-1"], *GPUS["services"].values()):
        assert f":{port}/" in service["healthcheck"]["test"][-1]
    for service in GPUS["services"].values():
        assert [one.rpartition(":")[2] for one in service["ports"]] == [str(port)]
    assert COMPOSE["services"]["router"]["command"][-1].count(f":{port}") == 2


def test_health_is_asked_at_paths_that_need_no_key() -> None:
    asked = [container()[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe")]
    healthcheck = "".join(
        service["healthcheck"]["test"][-1]
        for service in (COMPOSE["services"]["server-1"], *GPUS["services"].values())
    )
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
    build = GPUS["services"]["ranks"]["build"]
    assert build["args"].keys() == set(re.findall(r"^ARG (\w+)=", CONTAINERFILE, re.MULTILINE))
    assert sources == {"pyproject.toml", "README.md", "LICENSE", "radixkv", "workloads"}
    assert all((ROOT / source).exists() for source in sources)


def test_the_application_of_ray_exists() -> None:
    module, _, name = SERVE["applications"][0]["import_path"].partition(":")
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    assert f"\ndef {name}(" in source
    assert {deployment["name"] for deployment in SERVE["applications"][0]["deployments"]} <= set(
        re.findall(r'name="(\w+)"', source)
    )
