"""Recipes for several machines: their commands and flags exist, and their parts fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from counterpoint.cli import app

RECIPES = Path(__file__).parents[2] / "recipes" / "pools"


def trees(name: str) -> list[Any]:
    return list(yaml.safe_load_all((RECIPES / name).read_text()))


def commands(tree: Any) -> Iterator[list[str]]:
    """Every list in it that begins with our command."""
    if isinstance(tree, list) and tree[:1] == ["counterpoint"]:
        yield tree[1:]
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from commands(part)


def flag(words: list[str], name: str) -> str:
    return words[words.index(name) + 1] if name in words else ""


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml"])
def test_recipes_name_what_there_is(name: str):
    found = [words for tree in trees(name) for words in commands(tree)]
    assert [words[0] for words in found] == ["serve", "worker", "worker"]
    for words in found:
        app.parse_args(words, exit_on_error=False, print_error=False)
    assert {flag(words, "--role") for words in found[1:]} == {"prefill", "decode"}
    assert len({words[1] for words in found}) == 1, "one model"


def test_services_of_the_compose_file_fit_each_other():
    (tree,) = trees("compose.yaml")
    assert tree.keys() <= {"services", "secrets"}
    port = flag(tree["services"]["front"]["command"], "--cluster-listen").rpartition(":")[2]
    for name, service in tree["services"].items():
        words = service["command"]
        assert set(service["secrets"]) <= tree["secrets"].keys()
        assert flag(words, "--cluster-token-file") in {
            f"/run/secrets/{secret}" for secret in service["secrets"]
        }
        assert name == "front" or flag(words, "--join") == f"front:{port}"
        assert name == "front" or service["restart"] == "always"


def test_objects_of_the_kubernetes_file_fit_each_other():
    objects = {(tree["kind"], tree["metadata"]["name"]): tree for tree in trees("kubernetes.yaml")}
    service = objects.pop(("Service", "counterpoint"))["spec"]
    for (kind, name), tree in objects.items():
        assert kind == "Deployment"
        labels, pod = (
            tree["spec"]["template"]["metadata"]["labels"],
            tree["spec"]["template"]["spec"],
        )
        (container,) = pod["containers"]
        words = container["command"]
        assert tree["spec"]["selector"]["matchLabels"] == labels
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() <= {volume["name"] for volume in pod["volumes"]}
        assert str(Path(flag(words, "--cluster-token-file")).parent) in mounts.values()
        if name == "counterpoint-front":
            assert service["selector"] == labels and tree["spec"]["replicas"] == 1
            open_ports = {port["containerPort"] for port in container["ports"]}
            assert {port["port"] for port in service["ports"]} == open_ports
            assert int(flag(words, "--cluster-listen").rpartition(":")[2]) in open_ports
        else:
            host, _, port = flag(words, "--join").partition(":")
            assert host == "counterpoint" and int(port) in {
                port["port"] for port in service["ports"]
            }
