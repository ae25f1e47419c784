"""cluster.yaml and the files for Kubernetes: against Ray's own validation, and what may be wrong with such a file."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from click.testing import CliRunner
from packaging.requirements import Requirement
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.v2.instance_manager.subscribers.cloud_resource_monitor import CloudResourceMonitor
from ray.core.generated.instance_manager_pb2 import Instance, InstanceUpdateEvent

from raytrain_ft.cli.cluster import PLACEHOLDERS, examine
from raytrain_ft.cli.main import main

pytest.importorskip("boto3")
ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "cluster.yaml").read_text()
FILLED = TEXT.replace("ami-IMAGE", "ami-0123456789abcdef0").replace("fs-FILE-SYSTEM", "fs-0123456789abcdef0")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what the file mounts, and a home directory with a token."""
    for name in ("raytrain_ft", "pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "home" / ".ray").mkdir(parents=True)
    (tmp_path / "home" / ".ray" / "auth_token").write_text("token")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(place: Path, text: str) -> list[str]:
    file = place / "cluster.yaml"
    file.write_text(text)
    return examine(file)[1]


def test_rays_schema_and_rules_accept_the_file() -> None:
    config = prepare_config(yaml.safe_load(TEXT))
    validate_config(config)
    kinds = config["available_node_types"]
    assert kinds["head"]["max_workers"] == 0, "no second head"
    assert all(kind["max_workers"] == config["max_workers"] for name, kind in kinds.items() if name != "head")
    for name in ("head_setup_commands", "worker_setup_commands"):
        assert config[name] == config["setup_commands"], "none of Ray's defaults"


def test_nothing_is_wrong_once_the_placeholders_are_filled(place: Path) -> None:
    assert problems(place, FILLED) == []
    assert problems(place, TEXT) == [f"{word!r} is a placeholder: put in {what}" for word, what in PLACEHOLDERS.items()]


@pytest.mark.skipif(ray.__version__ != "2.60.0", reason="docs/cluster.md says what Ray 2.60.0 does: read this one's source")
def test_ray_learns_nothing_from_a_type_that_is_refused() -> None:
    """It knows of types without room, and what it knows is not told of a refusal."""
    monitor = CloudResourceMonitor()
    refused = InstanceUpdateEvent(instance_id="1", instance_type="spot-c6i", new_instance_status=Instance.ALLOCATION_FAILED)
    monitor.notify([refused])
    known = (monitor.get_resource_availabilities(), monitor.get_recoverable_resource_availabilities())
    assert known == ({}, {}), "Ray turns to another type by itself now: say so in cluster.yaml and in docs/cluster.md"
    refused.new_instance_status = Instance.ALLOCATION_TIMEOUT
    monitor.notify([refused])
    assert monitor.get_resource_availabilities() == {"spot-c6i": 0.0}, "the same event, with the status that it listens for"


def test_what_is_installed_has_the_exact_versions_of_all_that_the_project_names() -> None:
    """Else a replacement that is started in a month computes with others than those that it joins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [Requirement(line) for line in (*project["dependencies"], *extras["aws"], *extras["jobs"])]
    pinned: dict[str, str] = {}
    for command in yaml.safe_load(TEXT)["setup_commands"]:
        for word in shlex.split(command):
            name, _, exact = word.partition("==")
            pinned |= {name.partition("[")[0].lower(): exact} if exact else {}
    assert {requirement.name.lower() for requirement in named} == pinned.keys()
    for requirement in named:
        assert re.fullmatch(r"[0-9]+(\.[0-9]+)+", pinned[requirement.name.lower()])
        assert pinned[requirement.name.lower()] in requirement.specifier


def test_every_command_is_one_that_bash_can_read() -> None:
    config = yaml.safe_load(TEXT)
    commands = [line for name, lines in config.items() if name.endswith("_commands") for line in lines]
    assert len(commands) >= 10
    for command in commands:
        subprocess.run(["bash", "-n", "-c", command], check=True, timeout=10)


TELLS = """
from inspect import signature
from ray.autoscaler.v2.instance_manager.node_provider import NodeProviderAdapter
print(signature(NodeProviderAdapter).parameters["max_launch_batch_per_type"].default)
"""


def test_the_autoscaler_on_the_head_asks_aws_for_one_node_at_a_time(tmp_path: Path) -> None:
    """Ray's name for it, and set where it counts: `ray start` hands its environment to the autoscaler."""
    (command,) = (line for line in yaml.safe_load(TEXT)["head_start_ray_commands"] if "ray start" in line)
    starts = tmp_path / "venv" / "bin" / "ray"
    starts.parent.mkdir(parents=True)
    starts.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(TELLS)}\n")
    starts.chmod(0o700)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    told = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.split() == ["1"]


APT = """#!/bin/sh
echo "$DEBIAN_FRONTEND $NEEDRESTART_MODE $*" >> calls
[ "$(grep -c . calls)" -gt "$HELD" ] || exit 100
"""


@pytest.mark.parametrize(("held", "ends"), [(0, 0), (3, 0), (10_000, 1)])
def test_ubuntus_own_updates_hold_no_node_up_for_good(tmp_path: Path, held: int, ends: int) -> None:
    """They hold the locks of apt for minutes after the boot, and it gives up at once where it finds one held."""
    (command,) = (line for line in yaml.safe_load(TEXT)["initialization_commands"] if "apt-get" in line)
    for name, does in {"apt-get": APT, "sudo": '#!/bin/sh\nexec "$@"\n', "sleep": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(does)
        (tmp_path / name).chmod(0o700)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HELD": str(held)}
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, timeout=30).returncode == ends
    calls = (tmp_path / "calls").read_text().splitlines()
    assert all(call.startswith("noninteractive l -qq ") for call in calls), "nobody is asked anything"
    if ends:
        assert len(calls) == 60, "an error that stays is told in the end"
    else:
        assert re.search(r" -o DPkg::Lock::Timeout=[0-9]{3} install --yes .*\bnfs-common\b", calls[-1])
        assert calls[-2].endswith(" update"), "what it knows of is new"


HEAD_START = "RAY_AUTH_MODE=token ~/venv/bin/ray start --head"
SPOT_HEAD = "InstanceType: m6i.large\n      InstanceMarketOptions: {MarketType: spot}\n"
TOKEN = "  /home/ubuntu/.ray/auth_token: ~/.ray/auth_token\n"
MISTAKES = {
    "instance type": (
        "c6i.xlarge",
        "c6i.xlarges",
        "spot-c6i.node_config.InstanceType: EC2 has no 'c6i.xlarges'; did you mean",
    ),
    "head type": (
        "head_node_type: head",
        "head_node_type: heads",
        "no type 'heads' in available_node_types; did you mean 'head'",
    ),
    "provider": (
        "type: aws",
        "type: awz",
        "provider.type: Ray knows no 'awz'; did you mean 'aws'?; it knows aliyun, aws",
    ),
    "a word": (
        "\nmax_workers: 8",
        "\nmax_workers: many",
        "max_workers: refused by Ray's schema: 'many' is not of type",
    ),
    "a name": (
        "\nmax_workers:",
        "\nmax_workerz:",
        "refused by Ray's schema: Additional properties are not allowed",
    ),
    "too many": (
        "min_workers: 0",
        "min_workers: 20",
        "refused by Ray: The specified global `max_workers` is smaller",
    ),
    "spot head": ("InstanceType: m6i.large\n", SPOT_HEAD, "the head is a spot instance"),
    "IMDSv1": ("HttpTokens: required", "HttpTokens: optional", "set MetadataOptions HttpTokens to required"),
    "dashboard": (HEAD_START, f"{HEAD_START} --dashboard-host=0.0.0.0", "leave out --dashboard-host"),
    "no authentication": (
        HEAD_START,
        "~/venv/bin/ray start --head",
        "head_start_ray_commands: `ray start` without RAY",
    ),
    "no token here": ("~/.ray/auth_token\n", "~/.ray/no/auth_token\n", "there is no ~/.ray/no/auth_token here"),
    "no token there": (TOKEN, "", "the nodes need the token"),
    "shape": (
        "available_node_types:",
        "available_node_types: 3\nkinds:",
        "available_node_types: a mapping is needed",
    ),
    "market": (
        "InstanceType: m6i.large\n",
        "InstanceType: m6i.large\n      InstanceMarketOptions: spot\n",
        "node_config.InstanceMarketOptions: a mapping is needed, this is 'spot'",
    ),
    "mounts": ("\nfile_mounts:", "\nfile_mounts: []\nmounts:", "file_mounts: a mapping is needed, this is []"),
    "start": (
        "\nhead_start_ray_commands:",
        "\nhead_start_ray_commands: ray start\nothers:",
        "head_start_ray_commands: a list is needed, this is 'ray start'",
    ),
    "a list of providers": ("type: aws", "type: [aws]", "provider.type: a text is needed, this is ['aws']"),
    "a list of heads": ("head_node_type: head", "head_node_type: [head]", "head_node_type: a text is needed, this is ['head']"),
    "a list of instances": (
        "InstanceType: m6i.large",
        "InstanceType: [m6i.large]",
        "node_config.InstanceType: a text is needed, this is ['m6i.large']",
    ),
    "a command that is a number": (
        "\nhead_start_ray_commands:",
        "\nhead_start_ray_commands: [3]\nothers:",
        "head_start_ray_commands[0]: a text is needed, this is 3",
    ),
    "not YAML": ("cluster_name: raytrain-ft", "cluster_name: [raytrain-ft", "not YAML: while parsing a flow sequence"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_wrong_is_named(place: Path, mistake: str) -> None:
    old, new, message = MISTAKES[mistake]
    assert old in FILLED
    found = problems(place, FILLED.replace(old, new, 1))
    assert any(message in problem for problem in found), found


def test_files_are_looked_for_where_ray_does(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where it is called, not beside the cluster's file; and nobody is called nouser."""
    monkeypatch.chdir(place)
    assert problems(place, FILLED) == []
    monkeypatch.chdir(place / "home")
    assert "file_mounts./home/ubuntu/raytrain_ft/LICENSE: there is no LICENSE here" in problems(place, FILLED)
    (found,) = [one for one in problems(place, FILLED.replace(": ~/.ray/auth", ": ~nouser/.ray/auth")) if "nouser" in one]
    assert "there is no ~nouser/.ray/auth_token here" in found


def test_a_provider_that_does_not_exist_is_named_once(place: Path) -> None:
    assert len(problems(place, FILLED.replace("type: aws", "type: awz"))) == 1


def test_what_is_no_text(place: Path) -> None:
    file = place / "cluster.yaml"
    file.write_bytes(b"cluster_name: caf\xe9\n")
    assert examine(file)[1] == ["not a text in UTF-8: byte 17 is 0xe9"]


def test_the_command(place: Path) -> None:
    file = place / "cluster.yaml"
    file.write_text(FILLED)
    good = CliRunner().invoke(main, ["check-cluster", str(file)])
    assert good.exit_code == 0, good.output
    assert "c6i.xlarge" in good.output
    assert "AWS will say" in good.output
    file.write_text(TEXT)
    bad = CliRunner().invoke(main, ["check-cluster", str(file)])
    assert bad.exit_code == 1
    assert "'ami-IMAGE' is a placeholder" in bad.output


ELSEWHERE = {
    "gcp": ("type: gcp\n  availability_zone: us-west1-a\n  project_id: digits", "Google Cloud will say"),
    "azure": ("type: azure\n  location: westus2\n  resource_group: digits", "Azure will say"),
    "vsphere": ("type: vsphere", "the provider 'vsphere' will say. Whether the head may be taken back was not checked"),
}
"""Other providers: what the file says of each, and what is said of a good one."""


def elsewhere(provider: str, head: dict[str, Any], worker: dict[str, Any]) -> str:
    """The same cluster of another provider, with nodes like these."""
    lines, _ = ELSEWHERE[provider]
    config = yaml.safe_load(FILLED) | {"provider": yaml.safe_load(lines.replace("\n  ", "\n"))}
    kinds = config["available_node_types"]
    config["available_node_types"] = {
        name: kind | {"node_config": head if name == "head" else worker} for name, kind in kinds.items()
    }
    return yaml.safe_dump(config)


@pytest.mark.parametrize(
    ("provider", "spot", "lasting"),
    [
        ("gcp", {"scheduling": [{"preemptible": True}]}, {"scheduling": [{"onHostMaintenance": "MIGRATE"}]}),
        ("gcp", {"scheduling": {"provisioningModel": "SPOT"}}, {"scheduling": {"preemptible": False}}),
        ("azure", {"azure_arm_parameters": {"priority": "Spot"}}, {"azure_arm_parameters": {"priority": "Regular"}}),
        ("azure", {"azure_arm_parameters": {"priority": "Spot"}}, {}),
    ],
)
def test_a_head_that_may_be_taken_back_is_seen_elsewhere_too(
    place: Path, provider: str, spot: dict[str, Any], lasting: dict[str, Any]
) -> None:
    (problem,) = problems(place, elsewhere(provider, spot, spot))
    assert "the head is a spot instance" in problem
    assert problems(place, elsewhere(provider, lasting, spot)) == []
    good = CliRunner().invoke(main, ["check-cluster", str(place / "cluster.yaml")])
    assert ("on-demand" in good.output, "spot" in good.output) == (True, True)
    assert ELSEWHERE[provider][1] in good.output


def test_the_name_of_a_type_is_printed_as_it_is(place: Path) -> None:
    (place / "cluster.yaml").write_text(FILLED.replace("spot-c6i", "'c6i [/spot]'"))
    result = CliRunner().invoke(main, ["check-cluster", str(place / "cluster.yaml")])
    assert (result.exit_code, result.exception) == (0, None), result.output
    assert "│ c6i [/spot] " in result.output


def test_what_is_not_known_of_a_provider_is_told(place: Path) -> None:
    (place / "cluster.yaml").write_text(elsewhere("vsphere", {}, {}))
    output = CliRunner().invoke(main, ["check-cluster", str(place / "cluster.yaml")]).output
    assert ELSEWHERE["vsphere"][1] in output
    assert "on-demand" not in output


# ---------------------------------------------------------------- Kubernetes


def kubernetes() -> dict[str, dict[str, Any]]:
    """Every object in docs/kuberay, by kind."""
    documents = [d for path in sorted((ROOT / "docs" / "kuberay").glob("*.yaml")) for d in yaml.safe_load_all(path.read_text())]
    return {document["kind"]: document for document in documents}


def test_the_pair_for_kubernetes_fits_together() -> None:
    objects = kubernetes()
    cluster, job = objects["RayCluster"], objects["RayJob"]
    assert {cluster["apiVersion"], job["apiVersion"]} == {"ray.io/v1"}
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    assert "backoffLimit" not in job["spec"], "with a clusterSelector, KubeRay refuses it, or deletes the cluster at a retry"
    spec = cluster["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["autoscalerOptions"]["version"] == "v2"
    assert spec["rayVersion"] in TEXT, "the same version as in cluster.yaml"
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in spec["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["template"]["spec"]["nodeSelector"]["karpenter.sh/capacity-type"] == "spot"


def test_the_head_on_kubernetes_is_not_moved_to_save_a_node() -> None:
    """The run ends with it. Workers may be moved: that is a loss like any other."""
    asked = kubernetes()["RayCluster"]["spec"]["headGroupSpec"]["template"]["metadata"]["annotations"]
    # Texts: Kubernetes takes nothing else as an annotation.
    assert asked == {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}


def test_no_node_on_kubernetes_gets_two_worker_pods() -> None:
    cluster = kubernetes()["RayCluster"]
    for group in cluster["spec"]["workerGroupSpecs"]:
        (rule,) = group["template"]["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert rule["topologyKey"] == "kubernetes.io/hostname"
        labels = {"ray.io/cluster": cluster["metadata"]["name"], "ray.io/group": group["groupName"]}
        assert rule["labelSelector"] == {"matchLabels": labels}, "those that KubeRay gives to the pods of this group"


def test_every_pod_on_kubernetes_has_the_same_image_and_the_shared_directory() -> None:
    objects = kubernetes()
    spec = objects["RayCluster"]["spec"]
    pods = [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    claim = objects["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1
    for pod in pods:
        (volume,) = (v for v in pod["volumes"] if v.get("persistentVolumeClaim"))
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert {"name": volume["name"], "mountPath": "/mnt/shared"} in pod["containers"][0]["volumeMounts"]


def test_nfs_is_to_have_the_same_options_on_kubernetes_as_on_aws() -> None:
    """There they belong to the storage class, which is the reader's: so they are asked for where it is named."""
    options = re.findall(r"\bacdir\w+=[0-9]+", "".join(yaml.safe_load(TEXT)["initialization_commands"]))
    assert len(options) == 2
    section = (ROOT / "docs" / "cluster.md").read_text().split("\n## Kubernetes\n")[1].split("\n## ")[0]
    for text in ((ROOT / "docs" / "kuberay" / "cluster.yaml").read_text(), section):
        assert [option for option in options if option not in text] == []
