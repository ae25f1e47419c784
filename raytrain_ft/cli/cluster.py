"""`raytrain-ft check-cluster`: what is wrong with a `cluster.yaml`, before `ray up` costs anything.

Ray's own validation comes first and its verdict is kept. It does not know instance types, though, and says nothing of what this
project rests on: a head that is not taken back, token authentication, a file system that all nodes share.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml
from rich.table import Table

from raytrain_ft.cli import output
from raytrain_ft.fields import did_you_mean

console = output.console()
PLACEHOLDERS = {
    "ami-IMAGE": "the id of an Ubuntu 24.04 image in your region",
    "fs-FILE-SYSTEM": "the id of your EFS file system",
}
TOKEN_FILE = ".ray/auth_token"
CLOUDS = {"aws": "AWS", "gcp": "Google Cloud", "azure": "Azure"}
"""Providers of which it is known how a node says that it may be taken back."""


@click.command("check-cluster")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def check_cluster(file: Path) -> None:
    """Says what is wrong with a file for `ray up`: types that nobody knows, a head on spot, no authentication."""
    config, found = examine(file)
    for problem in found:
        console.print(f"{file}: {problem}", markup=False)
    if found:
        sys.exit(1)
    console.print(_table(config))
    provider = config["provider"].get("type")
    console.print(
        f"{file}: nothing is wrong that can be seen from here; whether your account may start these, "
        f"{CLOUDS.get(provider, f'the provider {provider!r}')} will say"
        + ("" if provider in CLOUDS else ". Whether the head may be taken back was not checked: Ray cannot go on without it"),
        markup=False,
    )


def examine(file: Path) -> tuple[dict[str, Any], list[str]]:
    """A cluster's configuration, and every problem with it, in words; the file is not changed and nothing is started."""
    try:
        text = file.read_text()
        config: Any = yaml.safe_load(text)
    except UnicodeDecodeError as error:
        return {}, [f"not a text in UTF-8: byte {error.start} is {error.object[error.start]:#x}"]
    except yaml.YAMLError as error:
        return {}, [f"not YAML: {' '.join(str(error).split())}"]
    if not isinstance(config, dict):
        return {}, [f"a mapping of settings is needed, this is a {type(config).__name__}"]
    shape = list(_misshapen(config))
    if shape:
        return config, shape
    return config, [
        *_unknown(config),
        *_refused_by_ray(config),
        *(f"{word!r} is a placeholder: put in {what}" for word, what in PLACEHOLDERS.items() if word in _uncommented(text)),
        *_missing_files(config),
        *_unsafe(config),
    ]


def _uncommented(text: str) -> str:
    return "\n".join(line.split("#", 1)[0] for line in text.splitlines())


# ---------------------------------------------------------------- shape and names


def _misshapen(config: dict[str, Any]) -> Iterator[str]:
    """What keeps the other checks from looking any further."""
    for name in ("provider", "available_node_types"):
        if not isinstance(config.get(name), dict):
            yield f"{name}: a mapping is needed, this is {config.get(name)!r}"
            return
    yield from _not_text("provider.type", config["provider"].get("type"))
    yield from _not_text("head_node_type", config.get("head_node_type"))
    if not config["available_node_types"]:
        yield "available_node_types: at least the head's type is needed"
    for name, kind in config["available_node_types"].items():
        if not isinstance(kind, dict) or not isinstance(kind.get("node_config", {}), dict):
            yield f"available_node_types.{name}: a mapping with a mapping `node_config` is needed, this is {kind!r}"
            continue
        for option in ("InstanceMarketOptions", "MetadataOptions"):
            value = kind.get("node_config", {}).get(option)
            if not isinstance(value, dict | None):
                yield f"available_node_types.{name}.node_config.{option}: a mapping is needed, this is {value!r}"
        instance = kind.get("node_config", {}).get("InstanceType")
        yield from _not_text(f"available_node_types.{name}.node_config.InstanceType", instance)
    for name, shape in {"file_mounts": dict, "head_start_ray_commands": list, "worker_start_ray_commands": list}.items():
        if not isinstance(config.get(name), shape | None):
            yield f"{name}: a {'mapping' if shape is dict else 'list'} is needed, this is {config[name]!r}"
        elif shape is list:
            for number, line in enumerate(config.get(name) or ()):
                yield from _not_text(f"{name}[{number}]", line)


def _not_text(where: str, value: Any) -> Iterator[str]:
    """What is absent is for Ray's schema to miss."""
    if not isinstance(value, str | None):
        yield f"{where}: a text is needed, this is {value!r}"


def _unknown(config: dict[str, Any]) -> Iterator[str]:
    """Names that stand for nothing: of a provider, of a node type, of an instance type."""
    from ray.autoscaler._private.providers import _NODE_PROVIDERS

    provider, kinds = config["provider"].get("type"), config["available_node_types"]
    if provider not in _NODE_PROVIDERS:
        hint = did_you_mean(provider, _NODE_PROVIDERS)
        yield f"provider.type: Ray knows no {provider!r}{hint}; it knows {_listed(_NODE_PROVIDERS)}"
    head = config.get("head_node_type")
    if head not in kinds:
        yield f"head_node_type: no type {head!r} in available_node_types{did_you_mean(head, kinds)}; there are {_listed(kinds)}"
    known = _instance_types() if provider == "aws" else frozenset()
    for name, kind in kinds.items():
        instance = kind.get("node_config", {}).get("InstanceType")
        if known and instance not in known:
            where = f"available_node_types.{name}.node_config.InstanceType"
            yield f"{where}: EC2 has no {instance!r}{did_you_mean(instance, known)}"


def _instance_types() -> frozenset[str]:
    """All of EC2's, as the installed botocore knows them; empty without botocore, which `ray up` for AWS needs."""
    try:
        import botocore.session
    except ImportError:
        return frozenset()
    return frozenset(botocore.session.get_session().get_service_model("ec2").shape_for("InstanceType").enum)


def _listed(known: Any) -> str:
    return ", ".join(sorted(map(str, known)))


# ---------------------------------------------------------------- Ray's verdict


def _refused_by_ray(config: dict[str, Any]) -> Iterator[str]:
    """Ray's schema and rules, applied as `ray up` does."""
    import jsonschema
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        with _quiet_ray():
            validate_config(prepare_config(copy.deepcopy(config)))
    except jsonschema.ValidationError as error:
        where = ".".join(map(str, error.absolute_path)) or "the file"
        yield f"{where}: refused by Ray's schema: {error.message}"
    except NotImplementedError:
        return  # the provider, which has been named already
    except (ValueError, RuntimeError, KeyError, TypeError, AssertionError) as error:
        if "head_node_type` must be one of" not in str(error):
            yield f"refused by Ray: {error}"


# ---------------------------------------------------------------- what this project rests on


@contextlib.contextmanager
def _quiet_ray() -> Iterator[None]:
    """Ray tells, while it validates, what defaults it fills in."""
    logger = logging.getLogger("ray.autoscaler")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)


def _missing_files(config: dict[str, Any]) -> Iterator[str]:
    for remote, local in (config.get("file_mounts") or {}).items():
        # As Ray does: from where it is called, and a "~name" that nobody has is a name like any other.
        if not os.path.exists(os.path.expanduser(str(local))):  # noqa: PTH110, PTH111
            hint = "; `ray get-auth-token --generate` makes it" if str(local).endswith(TOKEN_FILE) else ""
            yield f"file_mounts.{remote}: there is no {local} here{hint}"


def _unsafe(config: dict[str, Any]) -> Iterator[str]:
    """Settings that would work, and lose the run or open the cluster."""
    kinds, head = config["available_node_types"], config.get("head_node_type")
    for name, kind in kinds.items():
        node = kind.get("node_config", {})
        if name == head and _market(config, node) == "spot":
            yield f"available_node_types.{name}: the head is a spot instance; Ray cannot go on without its head, use on-demand"
        if config["provider"].get("type") == "aws" and (node.get("MetadataOptions") or {}).get("HttpTokens") != "required":
            yield f"available_node_types.{name}: set MetadataOptions HttpTokens to required, so that only IMDSv2 answers"
    if not any(name != head and kind.get("max_workers", config.get("max_workers", 0)) for name, kind in kinds.items()):
        yield "available_node_types: no type allows any workers"
    for where in ("head_start_ray_commands", "worker_start_ray_commands"):
        starts = [line for line in config.get(where) or () if "ray start" in line]
        if not starts:
            yield f"{where}: without a `ray start` of its own, Ray's default opens the dashboard to everybody"
        for line in starts:
            if "RAY_AUTH_MODE=token" not in line:
                yield f"{where}: `ray start` without RAY_AUTH_MODE=token takes orders from everybody"
            if "--dashboard-host" in line and "127.0.0.1" not in line:
                yield f"{where}: leave out --dashboard-host; `ray attach -p 8265` brings the dashboard to you"
    if not any(str(remote).endswith(TOKEN_FILE) for remote in config.get("file_mounts") or {}):
        yield f"file_mounts: the nodes need the token: /home/USER/{TOKEN_FILE}: ~/{TOKEN_FILE}"


def _market(config: dict[str, Any], node: dict[str, Any]) -> str:
    """As what a node is bought; one on "spot" may be taken back."""
    match config["provider"].get("type"):
        case "aws":
            return str((node.get("InstanceMarketOptions") or {}).get("MarketType", "on-demand"))
        case "gcp":
            scheduling = node.get("scheduling")
            parts = [part for part in (scheduling if isinstance(scheduling, list) else [scheduling]) if isinstance(part, dict)]
            is_spot = any(part.get("preemptible") is True or part.get("provisioningModel") == "SPOT" for part in parts)
        case "azure":
            parameters = node.get("azure_arm_parameters")
            is_spot = isinstance(parameters, dict) and parameters.get("priority") == "Spot"
        case _:
            return "not checked"
    return "spot" if is_spot else "on-demand"


def _table(config: dict[str, Any]) -> Table:
    table = Table("type", "instance", "market", "nodes", "resources")
    for name, kind in config["available_node_types"].items():
        node = kind.get("node_config", {})
        market = _market(config, node)
        most = kind.get("max_workers", config.get("max_workers"))
        count = "1, the head" if name == config["head_node_type"] else f"{kind.get('min_workers', 0)} to {most}"
        output.row(table, str(name), str(node.get("InstanceType", "")), market, count, str(kind.get("resources", "")))
    return table
