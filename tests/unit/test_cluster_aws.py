"""cluster.yaml on AWS: Ray's own node provider, and the part of its autoscaler that starts nodes, against a server that speaks
the APIs of EC2 and IAM. Nothing leaves the machine."""

from __future__ import annotations

import copy
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")

from botocore.exceptions import ClientError  # noqa: E402
from ray.autoscaler._private import commands  # noqa: E402
from ray.autoscaler._private.aws import config as aws_config  # noqa: E402
from ray.autoscaler._private.aws import utils as aws_utils  # noqa: E402
from ray.autoscaler._private.aws.node_provider import AWSNodeProvider  # noqa: E402
from ray.autoscaler._private.providers import _get_node_provider  # noqa: E402
from ray.autoscaler._private.util import prepare_config  # noqa: E402
from ray.autoscaler.v2.instance_manager.config import FileConfigReader  # noqa: E402
from ray.autoscaler.v2.instance_manager.node_provider import NodeProviderAdapter  # noqa: E402
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest  # noqa: E402
from ray.autoscaler.v2.schema import AutoscalerInstance  # noqa: E402
from ray.core.generated.autoscaler_pb2 import GangResourceRequest, NodeState, ResourceRequest  # noqa: E402
from ray.core.generated.instance_manager_pb2 import Instance, NodeKind  # noqa: E402

TEXT = (Path(__file__).parents[2] / "cluster.yaml").read_text()
REGION = "us-west-2"
SPOT = ("spot-c6i", "spot-m6i", "spot-r6i")
YOU = "203.0.113.7/32"
BATCH = int(re.findall(r"\bAUTOSCALER_MAX_LAUNCH_BATCH=([0-9]+) .*ray start --head", TEXT)[0])
"""For how many nodes the autoscaler asks in one call."""
DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of the server's EC2; this process and Ray see no other. The home directory is an empty one."""
    home = tmp_path_factory.mktemp("home")
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("token")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", REGION)
        patch.setenv("MOTO_IAM_LOAD_MANAGED_POLICIES", "true")
        # Ray waits 15 s, twice, until a new role is known everywhere in AWS; here it is known at once.
        patch.setattr(aws_config, "time", SimpleNamespace(sleep=lambda _: None))
        forget_clients()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        with (home / "moto.log").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            until(lambda: answers(port), "the server")
            assert server.poll() is None, (home / "moto.log").read_text()
            yield boto3.client("ec2", REGION)
        finally:
            server.kill()
            server.wait(10)
            forget_clients()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S:g} s"
        time.sleep(0.05)


def forget_clients() -> None:
    """Ray keeps its clients, and with them the address of the server."""
    aws_utils.resource_cache.cache_clear()
    aws_utils.client_cache.cache_clear()
    aws_config._get_subnets_or_die.cache_clear()


@pytest.fixture(scope="module")
def config(aws: Any) -> dict[str, Any]:
    """What `ray up` makes of cluster.yaml: with an image and everything that it creates or finds in the account. The security
    group is there before, as docs/cluster.md makes it."""
    (vpc,) = aws.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    group = aws.create_security_group(GroupName="raytrain-ft", Description="raytrain_ft", VpcId=vpc["VpcId"])["GroupId"]
    inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": YOU}]}
    aws.authorize_security_group_ingress(GroupId=group, IpPermissions=[inside, ssh])
    (image, *_) = aws.describe_images(Filters=[{"Name": "architecture", "Values": ["x86_64"]}])["Images"]
    return commands._bootstrap_config(yaml.safe_load(TEXT.replace("ami-IMAGE", image["ImageId"])), no_config_cache=True)


@pytest.fixture
def provider(aws: Any, config: dict[str, Any]) -> Iterator[AWSNodeProvider]:
    """Ray's provider; its nodes are terminated afterwards."""
    provider = _get_node_provider(config["provider"], config["cluster_name"], use_cache=False)
    assert type(provider) is AWSNodeProvider
    yield provider
    provider.terminate_nodes(provider.non_terminated_nodes({}))
    assert provider.non_terminated_nodes({}) == []


def on_the_head(config: dict[str, Any], provider: AWSNodeProvider) -> FileConfigReader:
    """What the autoscaler reads there: the file that `ray up` puts on the head."""
    shutil.copy(config["auth"]["ssh_private_key"], Path.home() / "ray_bootstrap_key.pem")
    with commands._set_up_config_for_head_node(config, provider, False)[1] as file:
        return FileConfigReader(file.name)


@pytest.fixture
def launch(provider: AWSNodeProvider) -> Callable[..., NodeProviderAdapter]:
    """Starts nodes as the autoscaler does on the head: from the file that `ray up` puts there."""

    def start(config: dict[str, Any], shape: dict[str, int], request: str = "request") -> NodeProviderAdapter:
        autoscaler = NodeProviderAdapter(provider, on_the_head(config, provider), max_launch_batch_per_type=BATCH)
        before = len(autoscaler.get_non_terminated())
        autoscaler.launch(shape, request)
        wanted = before + sum(shape.values())
        errors: list[Any] = []

        def settled() -> bool:
            errors.extend(autoscaler.poll_errors())
            return bool(errors) or len(autoscaler.get_non_terminated()) >= wanted

        until(settled, "nodes")
        assert errors == []
        return autoscaler

    return start


def instances(aws: Any, *states: str) -> list[dict[str, Any]]:
    """The instances that the server has, in these states (any if none is given)."""
    found = [i for r in aws.describe_instances()["Reservations"] for i in r["Instances"]]
    return [instance for instance in found if not states or instance["State"]["Name"] in states]


def tags(instance: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in instance["Tags"]}


def start_head(provider: AWSNodeProvider, config: dict[str, Any]) -> None:
    """As `ray up` does."""
    node = config["available_node_types"]["head"]["node_config"] | config["head_node"]
    about = {"ray-node-type": "head", "ray-user-node-type": "head", "ray-launch-config": "hash", "ray-node-name": "ray-head"}
    provider.create_node(node, about, 1)


# ---------------------------------------------------------------- what `ray up` prepares


def test_what_is_missing_in_the_account_is_made_once(aws: Any, config: dict[str, Any]) -> None:
    iam = boto3.client("iam")
    (role,) = iam.get_instance_profile(InstanceProfileName="ray-autoscaler-v1")["InstanceProfile"]["Roles"]
    policies = iam.list_attached_role_policies(RoleName=role["RoleName"])["AttachedPolicies"]
    assert {policy["PolicyName"] for policy in policies} == {"AmazonEC2FullAccess", "AmazonS3FullAccess"}
    (key,) = aws.describe_key_pairs()["KeyPairs"]
    file = Path(config["auth"]["ssh_private_key"])
    assert file.name == f"{key['KeyName']}.pem"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "PRIVATE KEY" in file.read_text()

    again = aws_config.bootstrap_aws(prepare_config(yaml.safe_load(TEXT)))
    assert again["auth"] == config["auth"]
    assert len(aws.describe_key_pairs()["KeyPairs"]) == 1


def test_nodes_reach_each_other_and_only_you_reach_them(aws: Any, config: dict[str, Any]) -> None:
    """Ray takes the group that docs/cluster.md makes as it is; without one, it would make one that lets everybody try SSH."""
    (group,) = aws.describe_security_groups(Filters=[{"Name": "group-name", "Values": ["raytrain-ft"]}])["SecurityGroups"]
    kinds = config["available_node_types"].values()
    assert {tuple(kind["node_config"]["SecurityGroupIds"]) for kind in kinds} == {(group["GroupId"],)}
    rules = [(rule.get("FromPort"), [r["CidrIp"] for r in rule["IpRanges"]]) for rule in group["IpPermissions"]]
    assert sorted(rules, key=str) == [(22, [YOU]), (None, [])]
    inside = [pair["GroupId"] for rule in group["IpPermissions"] for pair in rule["UserIdGroupPairs"]]
    assert inside == [group["GroupId"]]


def test_workers_have_the_cpus_that_the_file_says_and_the_memory_of_their_instances(config: dict[str, Any]) -> None:
    kinds = config["available_node_types"]
    types = {kinds[name]["node_config"]["InstanceType"] for name in SPOT}
    described = boto3.client("ec2", REGION).describe_instance_types(InstanceTypes=sorted(types))["InstanceTypes"]
    cpus = {kind["InstanceType"]: kind["VCpuInfo"]["DefaultVCpus"] for kind in described}
    for name in SPOT:
        assert kinds[name]["resources"]["CPU"] == cpus[kinds[name]["node_config"]["InstanceType"]]
        assert kinds[name]["resources"]["memory"] > 5 * 2**30
    assert kinds["head"]["resources"] == {"CPU": 0}


# ---------------------------------------------------------------- nodes


def test_workers_are_spot_instances_with_their_tags_and_the_head_is_not(aws, config, provider, launch) -> None:
    start_head(provider, config)
    autoscaler = launch(config, dict.fromkeys(SPOT, 1), "request-7")
    nodes = {tags(i)["ray-user-node-type"]: i for i in instances(aws, "running", "pending")}
    assert set(nodes) == {"head", *SPOT}
    assert nodes["head"].get("InstanceLifecycle") is None
    assert nodes["head"]["IamInstanceProfile"]["Arn"].endswith("instance-profile/ray-autoscaler-v1")
    for name, node in nodes.items():
        assert node["InstanceType"] == config["available_node_types"][name]["node_config"]["InstanceType"]
        assert node["MetadataOptions"]["HttpTokens"] == "required", "IMDSv2 only"
        assert tags(node)["ray-cluster-name"] == "raytrain-ft"
        (disk,) = aws.describe_volumes(VolumeIds=[node["BlockDeviceMappings"][0]["Ebs"]["VolumeId"]])["Volumes"]
        assert (disk["Size"], disk["Encrypted"]) == (60, True)
    for name in SPOT:
        assert nodes[name]["InstanceLifecycle"] == "spot"
        assert nodes[name].get("IamInstanceProfile") is None, "a worker may do nothing in the account"
        assert tags(nodes[name])["ray-node-type"] == "worker"
        assert tags(nodes[name])["ray-launch-request"] == "request-7"

    gone = nodes["spot-m6i"]["InstanceId"]
    autoscaler.terminate([gone], "request-8")
    until(lambda: gone not in autoscaler.get_non_terminated(), "the end of a node")
    assert {i["InstanceId"] for i in instances(aws, "terminated", "shutting-down")} >= {gone}
    left = Counter(node.node_type for node in autoscaler.get_non_terminated().values())
    assert left == Counter(["head", "spot-c6i", "spot-r6i"])


def test_a_node_that_aws_takes_back_is_no_longer_there_and_another_comes(aws, config, provider, launch) -> None:
    autoscaler = launch(config, {"spot-c6i": 1})
    (lost,) = autoscaler.get_non_terminated()
    aws.terminate_instances(InstanceIds=[lost])  # as an interruption ends
    until(lambda: not autoscaler.get_non_terminated(), "Ray to see it")
    autoscaler = launch(config, {"spot-c6i": 1}, "again")
    assert set(autoscaler.get_non_terminated()) != {lost}


def test_zones_are_tried_in_order_until_one_has_room(aws, config, launch) -> None:
    """A zone without room is one whose network does not exist: EC2 refuses, and Ray goes on to the next."""
    zone = {subnet["SubnetId"]: subnet["AvailabilityZone"] for subnet in aws.describe_subnets()["Subnets"]}
    subnets = config["available_node_types"]["spot-c6i"]["node_config"]["SubnetIds"]
    assert [zone[subnet] for subnet in subnets] == ["us-west-2a", "us-west-2b", "us-west-2c"]
    launch(config, {"spot-c6i": 1})
    full = copy.deepcopy(config)
    full["available_node_types"]["spot-c6i"]["node_config"]["SubnetIds"] = ["subnet-00000000", *subnets[1:]]
    launch(full, {"spot-c6i": 1}, "again")
    zones = [i["Placement"]["AvailabilityZone"] for i in instances(aws, "running", "pending")]
    assert sorted(zones) == ["us-west-2a", "us-west-2b"]


def test_a_zone_with_room_for_one_gives_one_and_the_next_zone_the_others(aws, config, provider, launch, monkeypatch) -> None:
    """EC2 grants a call for several in part, and Ray waits ten minutes for the rest: so it is to ask for each on its own."""
    room = {config["available_node_types"]["spot-c6i"]["node_config"]["SubnetIds"][0]: 1}
    create, lock = provider.ec2_fail_fast.create_instances, threading.Lock()

    def granted(**asked: Any) -> list[Any]:
        with lock:
            count = min(asked["MaxCount"], room.get(asked["SubnetId"], 8))
            if count < asked["MinCount"]:
                raise ClientError({"Error": {"Code": "InsufficientInstanceCapacity", "Message": "none"}}, "RunInstances")
            room[asked["SubnetId"]] = room.get(asked["SubnetId"], 8) - count
            return create(**asked | {"MaxCount": count})

    monkeypatch.setattr(provider.ec2_fail_fast, "create_instances", granted)
    launch(config, {"spot-c6i": 3})
    zones = [i["Placement"]["AvailabilityZone"] for i in instances(aws, "running", "pending")]
    assert sorted(zones) == ["us-west-2a", "us-west-2b", "us-west-2b"]


def test_types_with_subnets_of_their_own_are_spread_over_zones(aws, config, launch) -> None:
    """What docs/cluster.md says to do for that."""
    subnets = config["available_node_types"]["head"]["node_config"]["SubnetIds"]
    spread = copy.deepcopy(config)
    for name, subnet in zip(SPOT, subnets, strict=True):
        spread["available_node_types"][name]["node_config"]["SubnetIds"] = [subnet]
    launch(spread, dict.fromkeys(SPOT, 1))
    zones = {i["Placement"]["AvailabilityZone"] for i in instances(aws, "running", "pending")}
    assert zones == {"us-west-2a", "us-west-2b", "us-west-2c"}


# ---------------------------------------------------------------- which type


def asked_for(
    config: dict[str, Any], provider: AWSNodeProvider, worker: dict[str, float], running: str | None = None
) -> tuple[dict[str, int], list[str]]:
    """The nodes that the autoscaler on the head starts, by type, and those that it ends, when a run lacks room for three
    workers, each a placement group. One node, with a worker on it, may be there."""
    read = on_the_head(config, provider).get_cached_autoscaling_config()
    there = []
    if running:
        node = Instance(instance_id="1", cloud_instance_id="i-1", instance_type=running, node_kind=NodeKind.WORKER)
        node.status = Instance.RAY_RUNNING
        busy = NodeState(ray_node_type_name=running, total_resources={"CPU": 4}, available_resources={"CPU": 0})
        there = [AutoscalerInstance(cloud_instance_id="i-1", im_instance=node, ray_node=busy)]
    reply = ResourceDemandScheduler(None).schedule(
        SchedulingRequest(
            disable_launch_config_check=read.disable_launch_config_check(),
            node_type_configs=read.get_node_type_configs(),
            max_num_nodes=read.get_max_num_nodes(),
            gang_resource_requests=[GangResourceRequest(requests=[ResourceRequest(resources_bundle=worker)]) for _ in range(3)],
            current_instances=there,
        )
    )
    return {one.instance_type: one.count for one in reply.to_launch}, [one.instance_type for one in reply.to_terminate]


def test_ray_asks_for_the_first_type_of_the_file_and_turns_to_another_when_told(config, provider) -> None:
    """What docs/cluster.md says to do when AWS has none of it. Nodes that are there stay, which `max_workers` would end."""
    assert asked_for(config, provider, {"CPU": 4}) == ({"spot-c6i": 3}, [])
    lower, none = copy.deepcopy(config), copy.deepcopy(config)
    lower["available_node_types"]["spot-c6i"]["priority"] = -1
    none["available_node_types"]["spot-c6i"]["max_workers"] = 0
    assert asked_for(lower, provider, {"CPU": 4}, running="spot-c6i") == ({"spot-m6i": 3}, [])
    assert asked_for(none, provider, {"CPU": 4}, running="spot-c6i") == ({"spot-m6i": 3}, ["spot-c6i"])
    with_memory = {"CPU": 4, "memory": 4 * 2**30}
    assert asked_for(lower, provider, with_memory) == ({"spot-c6i": 3}, []), "the one that it fills best"
    assert asked_for(none, provider, with_memory) == ({"spot-m6i": 3}, [])
