"""Every source of notices against a real HTTP server that speaks the real protocol, and against those that misbehave."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any

import pytest
from clouds import AzureVm, Ec2, Gce, Server, reply
from ray.exceptions import RaySystemError

from raytrain_ft import RecoveryConfig
from raytrain_ft.errors import ConfigError, MetadataError
from raytrain_ft.policy import messages as m
from raytrain_ft.policy.leaving import DRAIN, LAPSE_AFTER_S, REQUEST, SIGTERM
from raytrain_ft.runtime import nodes
from raytrain_ft.runtime.contacts import Contacts
from raytrain_ft.runtime.health import Health
from raytrain_ft.runtime.heartbeat import Heartbeat
from raytrain_ft.runtime.notice_board import NoticeBoard
from raytrain_ft.runtime.notices import azure as azure_module
from raytrain_ft.runtime.notices.aws import Aws
from raytrain_ft.runtime.notices.azure import Azure
from raytrain_ft.runtime.notices.gcp import Gcp
from raytrain_ft.runtime.notices.metadata import ENDPOINT_VARIABLE, MOST_BYTES, Metadata
from raytrain_ft.runtime.notices.notice import Notice, NoticeSpec, Source
from raytrain_ft.runtime.preemption import CLOUDS, Preemption
from raytrain_ft.runtime.spec import Beat


def in_seconds(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def iso(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


# ---------------------------------------------------------------- the clouds as they are


def test_aws_interruption_and_rebalance_with_tokens() -> None:
    with Ec2() as server:
        aws = Aws(Metadata(server.url))
        assert aws.detect()
        assert aws.poll() == []
        server.rebalance = json.dumps({"noticeTime": iso(in_seconds(-3))})
        (advice,) = aws.poll()
        assert (advice.source, advice.deadline_s) == ("aws rebalance", 120.0)
        server.spot = json.dumps({"action": "terminate", "time": iso(in_seconds(90))})
        server.tokens.clear()  # the token is not known any more: a new one is fetched
        (notice,) = aws.poll()
        assert notice.source == "aws spot"
        assert 87 < notice.deadline_s <= 90
        assert "terminate" in notice.reason
        assert sum(request.startswith("PUT") for request in server.requests) == 2
        server.spot = json.dumps({"action": "hibernate", "time": iso(in_seconds(90))})
        (notice,) = aws.poll()
        assert notice.deadline_s == 0, "hibernation begins at once"


@pytest.mark.parametrize(
    ("value", "seconds", "words"),
    [
        ({"preempted": "TRUE"}, 30.0, "preempted"),
        ({"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}, 60.0, "maintenance"),
        ({"maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE"}, None, ""),
    ],
)
def test_google_preemption_and_maintenance(value: dict[str, str], seconds: float | None, words: str) -> None:
    with Gce() as server:
        gcp = Gcp(Metadata(server.url))
        assert gcp.detect()
        assert gcp.poll() == []
        server.values.update(value)
        notices = gcp.poll()
        assert [notice.deadline_s for notice in notices] == ([] if seconds is None else [seconds])
        assert all(words in notice.reason for notice in notices)


def event(kind: str, *machines: str, seconds: float | None = 300) -> dict[str, object]:
    """A scheduled event as Azure writes it; without seconds it has begun."""
    when = "" if seconds is None else format_datetime(in_seconds(seconds), usegmt=True)
    return {"EventId": "602d", "EventType": kind, "ResourceType": "VirtualMachine", "Resources": list(machines)} | {
        "EventStatus": "Scheduled" if when else "Started",
        "NotBefore": when,
        "EventSource": "Platform",
    }


def test_azure_events_that_name_this_machine() -> None:
    with AzureVm("gpu-set_3") as server:
        azure = Azure(Metadata(server.url))
        assert azure.detect()
        assert azure.poll() == []
        server.events = [event("Preempt", "gpu-set_4"), event("Freeze", "gpu-set_3"), event("Reboot", "gpu-set_33")]
        assert azure.poll() == []  # others go, and this one is frozen for a moment
        server.events += [event("Terminate", "gpu-set_3", seconds=600), event("Preempt", "GPU-set_3", "gpu-set_4", seconds=25)]
        terminate, preempt = azure.poll()
        assert (terminate.source, preempt.source) == ("azure terminate", "azure preempt")
        assert 22 < preempt.deadline_s <= 25
        assert "Preempt" in preempt.reason
        server.events = [event("Redeploy", "gpu-set_3", seconds=None)]
        (notice,) = azure.poll()
        assert notice.deadline_s == 0
        assert not any("POST" in request for request in server.requests)  # nothing was acknowledged


def test_what_azure_announces_days_ahead_is_no_notice_before_its_last_hour() -> None:
    """Else the worker would leave days too early, and the event not be believed when its time has come."""
    with AzureVm("gpu-set_3") as server:
        azure = Azure(Metadata(server.url))
        reboot = event("Reboot", "gpu-set_3", seconds=300)
        server.events = [event("Redeploy", "gpu-set_3", seconds=3 * 86_400), reboot]
        assert [notice.source for notice in azure.poll()] == ["azure reboot"]
        server.events = [event("Redeploy", "gpu-set_3", seconds=3590)]
        (notice,) = azure.poll()
        assert notice.source == "azure redeploy"
        assert 3580 < notice.deadline_s <= 3590


@pytest.mark.parametrize("behind", [600, 2 * 3600])
def test_what_azure_says_is_soon_is_soon_on_a_machine_whose_clock_is_behind(behind: int) -> None:
    """And it is no event of another day."""
    with AzureVm("gpu-set_3") as server:
        azure = Azure(Metadata(server.url))
        kinds = {"Terminate": 600 + behind, "Preempt": 30 + behind}
        server.events = [event(kind, "gpu-set_3", seconds=seconds) for kind, seconds in kinds.items()]
        assert [notice.deadline_s for notice in azure.poll()] == [900, 30]


def test_azure_may_take_long_to_answer_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def deadline(seconds: float) -> None:
        monkeypatch.setattr(azure_module, "EVENTS_DEADLINE_S", seconds)

    with AzureVm() as server:
        azure = Azure(Metadata(server.url))
        server.events = [event("Preempt", "gpu-set_3")]
        server.answers.clear()
        deadline(0.1)
        assert azure.poll() == []  # no answer yet, which is not a fault yet
        server.answers.set()
        deadline(30.0)
        assert len(azure.poll()) == 1
    with AzureVm() as server:
        azure = Azure(Metadata(server.url))
        server.answers.clear()
        deadline(0.1)
        assert azure.poll() == []
        later = time.monotonic() + azure_module.FIRST_ANSWER_S
        monkeypatch.setattr(azure_module, "time", SimpleNamespace(monotonic=lambda: later))
        with pytest.raises(MetadataError):
            azure.poll()


def test_each_cloud_is_told_from_the_others() -> None:
    with Ec2() as ec2, Gce() as gce, AzureVm() as azure:
        for server, name in ((ec2, "aws"), (gce, "gcp"), (azure, "azure")):
            found = []
            for kind in CLOUDS.values():
                source = kind(Metadata(server.url))
                try:
                    found += [source.name] if source.detect() else []
                except MetadataError:
                    continue
            assert found == [name]


# ---------------------------------------------------------------- services that misbehave


def floods(request: BaseHTTPRequestHandler) -> None:
    """A body that never ends."""
    request.send_response(200)
    request.send_header("Metadata-Flavor", "Google")
    request.end_headers()
    while True:
        request.wfile.write(b"A" * 65536)


def promises_a_terabyte(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(2**40))
    request.end_headers()
    request.wfile.write(b"TRUE")
    request.close_connection = True


def endless_headers(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        request.wfile.write(b"X-More: 1\r\n" * 50)


def one_long_header(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        request.wfile.write(b"A" * 4096)


def trickles(request: BaseHTTPRequestHandler) -> None:
    """Always a byte more, just in time for a deadline of a single read."""
    request.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        request.wfile.write(b"T")
        request.wfile.flush()
        time.sleep(0.05)


def never_answers(request: BaseHTTPRequestHandler) -> None:
    time.sleep(5)
    request.close_connection = True


def keeps_saying_continue(request: BaseHTTPRequestHandler) -> None:
    while True:
        request.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def redirects(request: BaseHTTPRequestHandler) -> None:
    reply(request, 302, Location="http://127.0.0.1:1/", Metadata_Flavor="Google")


def cut_short(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\nContent-Length: 40\r\n\r\nTRUE")
    request.close_connection = True


def no_http(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"\x80\x04\x95 hello\r\n\r\n")
    request.close_connection = True


def says(status: int, body: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        reply(request, status, body, Metadata_Flavor="Google")

    answer.__name__ = f"{status} {body[:20]}"
    return answer


MISBEHAVING = [
    *(floods, promises_a_terabyte, endless_headers, one_long_header, trickles, never_answers, keeps_saying_continue, redirects),
    *(
        cut_short,
        no_http,
        says(500, "oops"),
        says(200, ""),
        says(200, "true"),
        says(200, "TRUE\nTRUE"),
        says(200, "{" * 30_000),
    ),
    *(
        says(200, "<html>please log in</html>"),
        says(200, '{"action": "terminate"}'),
        says(200, '{"Events": {}}'),
        says(503, "TRUE"),
    ),
    says(200, json.dumps({"action": "terminate", "time": "soon"})),
    says(200, json.dumps({"action": "dance", "time": "2026-11-21T08:22:00Z"})),
    says(200, json.dumps({"action": "terminate", "time": "2026-11-21T08:22:00"})),  # of which time zone?
]


@pytest.mark.parametrize("handle", MISBEHAVING, ids=lambda handle: handle.__name__)
def test_whatever_a_service_says_no_source_gives_a_false_notice_nor_takes_long(
    handle: Callable[[BaseHTTPRequestHandler], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(azure_module, "EVENTS_DEADLINE_S", 0.3)
    monkeypatch.setattr(azure_module, "FIRST_ANSWER_S", 0.0)

    class Hasty(Metadata):
        """With a deadline that suits a test."""

        def ask(self, method: str, path: str, headers: object, deadline_s: float = 0.2):
            return super().ask(method, path, headers, min(deadline_s, 0.2))  # type: ignore[arg-type]

    def token_first(request: BaseHTTPRequestHandler) -> None:
        """So that the question after the token is answered in this way, too."""
        if request.path == "/latest/api/token":
            reply(request, 200, "token")
        elif request.path.startswith("/metadata/instance"):
            reply(request, 200, '{"name": "me", "azEnvironment": "AzurePublicCloud"}')
        else:
            handle(request)

    for behaviour in (handle, token_first):
        with Server(behaviour) as server:
            for kind in (Aws, Gcp, Azure):
                began = time.monotonic()
                with pytest.raises(MetadataError):
                    kind(Hasty(server.url)).poll()
                assert time.monotonic() - began < 2
            assert all("127.0.0.1:1/" not in request for request in server.requests)


def test_a_time_that_cannot_be_is_brought_within_reason() -> None:
    with Ec2() as server:
        for moment, least, most in (("1999-01-01T00:00:00Z", 0, 0), ("9999-12-31T23:59:59Z", 120, 120)):
            server.spot = json.dumps({"action": "stop", "time": moment})
            (notice,) = Aws(Metadata(server.url)).poll()
            assert least <= notice.deadline_s <= most


def test_a_body_up_to_the_limit_is_read_and_the_limit_counts_every_byte() -> None:
    with Server(lambda request: reply(request, 200, "x" * (MOST_BYTES - 1000))) as server:
        assert len(Metadata(server.url).get("/", {}).body) == MOST_BYTES - 1000
    with (
        Server(lambda request: reply(request, 200, "x" * MOST_BYTES)) as server,
        pytest.raises(MetadataError, match="longer than"),
    ):
        Metadata(server.url).get("/", {})


@pytest.mark.parametrize(
    "endpoint",
    [
        *(
            "http://93.184.216.34",
            "http://metadata.google.internal",
            "https://127.0.0.1",
            "http://127.0.0.1:99999",
            "127.0.0.1:80",
        ),
        *("http://user@127.0.0.1", "http://127.0.0.1/path", "file:///etc/passwd", "http://0.0.0.0", "http://10.0.0.1:80", ""),
    ],
)
def test_no_setting_makes_a_worker_ask_another_machine(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=ENDPOINT_VARIABLE):
        Metadata(endpoint)


def test_endpoints_of_this_machine_and_its_link() -> None:
    for endpoint in ("http://169.254.169.254", "http://127.0.0.1:8080/", "http://[::1]:80", "http://[fd00:ec2::254]"):
        Metadata(endpoint)


# ---------------------------------------------------------------- the thread that asks


def spec(*clouds: str, detect: bool = False, grace_s: float | None = None) -> NoticeSpec:
    return NoticeSpec(clouds=clouds, detect=detect, drain=False, grace_s=grace_s)


def until(condition: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_the_cloud_is_found_and_its_most_urgent_notice_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain_ft.runtime.preemption.POLL_S", 0.05)
    complaints: list[tuple[str, str]] = []
    with Ec2() as server:
        monkeypatch.setenv(ENDPOINT_VARIABLE, server.url)
        preemption = Preemption(spec("gcp", "azure", "aws", detect=True), lambda *what: complaints.append(what))
        preemption.start()
        assert until(lambda: any("spot" in request for request in server.requests))
        assert preemption.notices() == ()
        server.spot = json.dumps({"action": "terminate", "time": iso(in_seconds(100))})
        assert until(lambda: preemption.notices() != ())
        first = seconds_left(preemption)
        server.spot = json.dumps({"action": "terminate", "time": iso(in_seconds(110))})  # a service that changes its mind
        count = len(server.requests)
        assert until(lambda: len(server.requests) > count + 2)
        assert 80 < seconds_left(preemption) < first <= 100
        server.spot = json.dumps({"action": "terminate", "time": iso(in_seconds(20))})  # it is in more of a hurry
        assert until(lambda: seconds_left(preemption) <= 20)
    assert until(lambda: bool(complaints))
    time.sleep(0.3)
    assert [source for source, _ in complaints] == ["aws"]  # the service is gone: said once
    assert "refused" in complaints[0][1]


def seconds_left(preemption: Preemption) -> float:
    """Of its most urgent notice."""
    return next((notice.deadline_s for notice in preemption.notices()), math.inf)


def test_a_second_event_of_a_cloud_may_be_more_urgent_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain_ft.runtime.preemption.POLL_S", 0.05)
    with AzureVm("gpu-set_3") as azure, Gce() as gce:
        heard: list[Preemption] = []
        for name, server in (("azure", azure), ("gcp", gce)):
            monkeypatch.setenv(ENDPOINT_VARIABLE, server.url)
            heard.append(Preemption(spec(name), lambda *_: None))
            heard[-1].start()
        azure.events = [event("Terminate", "gpu-set_3", seconds=600)]
        gce.values["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
        assert until(lambda: 30 < seconds_left(heard[0]) <= 600 and 30 < seconds_left(heard[1]) <= 60)
        azure.events.append(event("Preempt", "gpu-set_3", seconds=30))
        gce.values["preempted"] = "TRUE"
        assert until(lambda: all(seconds_left(preemption) <= 30 for preemption in heard))


def test_a_notice_that_lapsed_does_not_hide_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain_ft.runtime.preemption.LAPSE_AFTER_S", 0.2)
    preemption = Preemption(spec("aws"), lambda *_: None)
    preemption._take(Notice(0.0, "aws rebalance", "advice"))
    preemption._take(Notice(100.0, "aws spot", "terminate"))
    assert seconds_left(preemption) == 0
    assert until(lambda: seconds_left(preemption) > 90)


def test_a_source_with_a_bug_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain_ft.runtime.preemption.POLL_S", 0.02)

    class Broken:
        name = "broken"
        polls = 0

        def __init__(self, metadata: Metadata) -> None:
            del metadata

        def detect(self) -> bool:
            return True

        def poll(self) -> list[Notice]:
            Broken.polls += 1
            raise RecursionError("a bug")

    kinds: dict[str, Callable[[Metadata], Source]] = {"broken": Broken}
    monkeypatch.setattr("raytrain_ft.runtime.preemption.CLOUDS", kinds)
    complaints: list[tuple[str, str]] = []
    preemption = Preemption(spec("broken"), lambda *what: complaints.append(what))
    preemption.start()
    assert until(lambda: Broken.polls > 3)
    assert complaints == [("broken", "RecursionError: a bug")]
    assert preemption.notices() == ()


def test_a_version_of_ray_that_does_not_tell_of_drains_is_on_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> dict[str, float]:
        raise AttributeError("no get_draining_nodes")

    monkeypatch.setattr(nodes, "draining", missing)
    told: list[m.Event] = []
    heed: Any = SimpleNamespace(notices=NoticeSpec(clouds=(), detect=False, drain=True, grace_s=None))
    board = NoticeBoard(told.append, lambda: 1.0)
    watcher = nodes.Nodes(heed, told.append, board, Contacts(heed), lambda node: None)
    assert not asyncio.run(watcher._sees_drains())
    assert [(e.source, e.member) for e in told if isinstance(e, m.NoticesUnavailable)] == [("ray", None)]


TERMINATED = """
import multiprocessing, time
import raytrain_ft.runtime.preemption
from raytrain_ft.runtime.notices.notice import NoticeSpec
from raytrain_ft.runtime.preemption import Preemption
raytrain_ft.runtime.preemption.DETECT_AFTER_S = (60.0,)
preemption = Preemption(NoticeSpec(clouds={clouds}, detect=True, drain=False, grace_s={grace}), print)
preemption.start()
fork = multiprocessing.get_context("fork")
begun = fork.Event()
child = fork.Process(target=lambda: (begun.set(), time.sleep(60)))
child.start()
begun.wait(20)
child.terminate()
child.join(10)
print("ready", child.exitcode, flush=True)
while True:
    for notice in preemption.notices():
        print(notice.source, notice.deadline_s, flush=True)
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("twice", "clouds"),
    [(False, ()), (False, ("aws",)), (True, ())],
    ids=["at its deadline", "while a cloud is looked for", "when it is asked twice"],
)
def test_after_sigterm_a_process_goes_on_and_then_ends(twice: bool, clouds: tuple[str, ...]) -> None:
    script = TERMINATED.format(grace=60 if twice else 1.0, clouds=clouds)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready -15\n"  # what it forks off is not protected from SIGTERM
        process.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        source, left = process.stdout.readline().split()
        assert source == SIGTERM
        assert float(left) > (55 if twice else 0.5)
        if twice:
            process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM
        waited = time.monotonic() - asked
        assert waited < 5 if twice else 1.0 <= waited < 5
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- what the supervisor makes of it


def test_a_worker_has_one_notice_of_each_source_and_only_if_it_is_more_urgent() -> None:
    told: list[m.Event] = []
    clock = [10.0]
    board = NoticeBoard(told.append, lambda: clock[0])
    for _ in range(1000):
        board.noticed("w0", "n0", Notice(100.0, "aws rebalance", "advice"))
        clock[0] += 0.01
    board.noticed("w0", "n0", Notice(95.0, DRAIN, "later than the first"))
    board.noticed("w0", "n0", Notice(30.0, "aws spot", "sooner"))
    board.noticed("w1", "n1", Notice(30.0, SIGTERM, "another worker"))
    notices = [(e.member, e.source, e.deadline_s) for e in told if isinstance(e, m.Noticed)]
    assert notices == [("w0", "aws rebalance", 100.0), ("w0", "aws spot", 30.0), ("w1", SIGTERM, 30.0)]
    assert board.condemned() == {"n0", "n1"}

    again: list[m.Event] = []
    restarted = NoticeBoard(again.append, lambda: clock[0])
    for known in told:
        assert isinstance(known, m.Noticed)
        restarted.recall(known, {"w0": "n0", "w1": "n1"}[known.member])
    restarted.noticed("w0", "n0", Notice(30.0, "aws spot", "sooner"))
    assert again == []
    assert restarted.condemned() == {"n0", "n1"}
    clock[0] += 60
    later = NoticeBoard(again.append, lambda: clock[0])
    for known in told:
        assert isinstance(known, m.Noticed)
        later.recall(known, {"w0": "n0", "w1": "n1"}[known.member])
    assert later.condemned() == {"n0"}  # the process of w1 was to end, its node was not
    clock[0] += 100
    assert later.condemned() == set(), "nobody took n0 away"


def test_who_is_wrong_about_a_node_is_not_believed_about_it_again() -> None:
    told: list[m.Event] = []
    clock = [0.0]
    board = NoticeBoard(told.append, lambda: clock[0])
    advice, terminate = Notice(100.0, "aws rebalance", "advice"), Notice(30.0, "aws spot", "terminate")
    board.noticed("w0", "n0", advice)
    clock[0] = 100.0 + LAPSE_AFTER_S
    board.noticed("w1", "n0", advice)  # a worker that was started there meanwhile hears it too
    board.noticed("w2", "n1", advice)
    assert board.condemned() == {"n1"}
    board.noticed("w0", "n0", terminate)  # that is another matter, and news although what was said before was for sooner
    assert board.condemned() == {"n0", "n1"}
    notices = [(e.member, e.source) for e in told if isinstance(e, m.Noticed)]
    assert notices == [("w0", "aws rebalance"), ("w2", "aws rebalance"), ("w0", "aws spot")]


def test_a_deadline_does_not_slip_by_the_time_that_the_supervisor_was_away() -> None:
    told: list[m.Event] = []
    board = NoticeBoard(told.append, lambda: 10.0)  # the run's clock goes on where it stopped
    board.recall(m.Noticed(at=10.0, member="w0", deadline_s=100.0, source="aws spot", reason="terminate"), "n0")
    for _ in range(3):
        board.noticed("w0", "n0", Notice(70.0, "aws spot", "terminate"))  # 30 s were lost, and the worker knows
    assert [e.deadline_s for e in told if isinstance(e, m.Noticed)] == [70.0]


def test_a_person_may_ask_again_as_long_as_it_is_sooner() -> None:
    told: list[m.Event] = []
    clock = [0.0]
    board = NoticeBoard(told.append, lambda: clock[0])
    for at, seconds in ((0, 120), (1, 119.5), (2, 60), (3, 59.5), (70, 120)):  # the last after what was asked before lapsed
        clock[0] = at
        board.noticed("w0", "n0", Notice(seconds, REQUEST, "a person asked for it"))
    assert [e.deadline_s for e in told if isinstance(e, m.Noticed)] == [120, 60, 120]
    board.noticed("w1", "n1", Notice(30.0, "aws spot", "terminate"))
    board.noticed("w1", "n1", Notice(29.5, REQUEST, "a person asked for it"))
    assert isinstance(told[-1], m.Noticed)
    assert told[-1].deadline_s == 29.5
    board.noticed("w2", "n2", Notice(30.0, "aws spot", "terminate"))
    board.noticed("w2", "n2", Notice(90.0, REQUEST, "a person asked for it"))  # the cloud may be wrong
    assert isinstance(told[-1], m.Noticed)
    assert (told[-1].member, told[-1].deadline_s) == ("w2", 90.0)


def test_a_node_whose_process_was_to_go_is_used_again_once_it_has_gone() -> None:
    """Its place is free, and may be the only one for who is to replace another."""
    board = NoticeBoard(lambda event: None, lambda: 0.0)
    board.noticed("w0", "n0", Notice(3600.0, REQUEST, "a person asked for it"))
    board.noticed("w1", "n0", Notice(60.0, SIGTERM, "another worker there"))
    board.noticed("w2", "n1", Notice(30.0, "aws spot", "terminate"))
    board.forget("w0")
    assert board.condemned() == {"n0", "n1"}
    board.forget("w1")
    board.forget("w2")
    assert board.condemned() == {"n1"}, "that one will be gone itself"


def test_a_node_that_a_cloud_takes_away_is_avoided_whatever_else_is_said() -> None:
    board = NoticeBoard(lambda event: None, lambda: 0.0)
    board.noticed("w0", "n0", Notice(30.0, "aws spot", "terminate"))
    board.noticed("w0", "n0", Notice(0.0, REQUEST, "a person asked for it"))
    board.noticed("w1", "n0", Notice(0.0, SIGTERM, "another worker there"))
    assert board.condemned() == {"n0"}


def test_a_node_that_goes_is_told_from_one_that_ray_drains_and_one_that_stays() -> None:
    clock = [0.0]
    board = NoticeBoard(lambda event: None, lambda: clock[0])
    contacts = Contacts(SimpleNamespace())  # pyright: ignore[reportArgumentType]
    contacts.placed |= {"w0": "n0", "w1": "n1", "w2": "n2"}
    board.noticed("w0", "n0", Notice(30.0, "aws spot", "terminate"))
    board.noticed("w1", "n1", Notice(30.0, "aws spot", "terminate"))
    board.noticed("w2", "n2", Notice(30.0, REQUEST, "a person asked for it"))
    board.drained({"n1": 20.0}, ["w0", "w1", "w2"], contacts)
    assert board.condemned() == {"n0", "n1", "n2"}
    assert board.going() == {"n0", "n2"}, "Ray places there what it is asked to"
    clock[0] = 30.0 + LAPSE_AFTER_S
    assert board.going() == set(), "nobody took n0 away"


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="preemption"):
        RecoveryConfig(preemption=("ibm",))
    with pytest.raises(ConfigError, match="preemption"):
        RecoveryConfig(preemption="aws")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="sigterm_grace"):
        RecoveryConfig(sigterm_grace=timedelta(0))
    RecoveryConfig(preemption=("aws", "sigterm"))
    RecoveryConfig(preemption=None)


def test_nobody_is_asked_unless_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    with Ec2() as server:
        monkeypatch.setenv(ENDPOINT_VARIABLE, server.url)
        before = signal.getsignal(signal.SIGTERM)
        Preemption(spec(), lambda *_: None).start()
        time.sleep(0.2)
        assert server.requests == []
        assert signal.getsignal(signal.SIGTERM) == before


def test_a_drain_that_lasts_is_told_once() -> None:
    """Nothing happens at its deadline where the number of workers is fixed, and Ray says it for as long as it lasts."""
    told: list[m.Event] = []
    now, contacts = [0.0], Contacts(SimpleNamespace())  # pyright: ignore[reportArgumentType]
    contacts.placed["w0"] = "n0"
    board = NoticeBoard(told.append, lambda: now[0])
    for at in (0.0, 30.0, 95.0, 5000.0):
        now[0] = at
        board.drained({"n0": max(0.0, 30.0 - at)}, ["w0"], contacts)
    assert [event.deadline_s for event in told if isinstance(event, m.Noticed)] == [30.0]


def test_a_question_for_drains_that_fails_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own state may not answer the first one, after a restart of the supervisor; and nodes are looked at meanwhile."""
    answers: list[Any] = [RaySystemError("failed to connect to GCS"), RaySystemError("again"), {"n0": time.time() + 30}]

    def draining() -> dict[str, float]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(nodes, "draining", draining)
    monkeypatch.setattr(nodes, "INTERVAL_S", 0.01)
    monkeypatch.setattr(nodes.placement, "nodes", list)
    told: list[m.Event] = []
    heed: Any = SimpleNamespace(options={"num_cpus": 1}, notices=NoticeSpec(clouds=(), detect=False, drain=True, grace_s=None))
    contacts = Contacts(heed)
    contacts.placed["w0"] = "n0"
    watcher = nodes.Nodes(heed, told.append, NoticeBoard(told.append, lambda: 1.0), contacts, lambda node: None)

    async def play() -> None:
        watch = asyncio.create_task(watcher.watch(lambda: ["w0"]))
        for _ in range(500):
            if len(told) > 1:
                break
            await asyncio.sleep(0.01)
        watch.cancel()

    asyncio.run(play())
    assert [type(event) for event in told] == [m.CapacityChanged, m.Noticed], "nodes are counted also without an answer"


@pytest.mark.parametrize(
    ("until", "ahead", "left"), [(630.0, 600.0, 30.0), (30.0, -600.0, 30.0), (30.0, None, 30.0), (math.inf, 600.0, 3600.0)]
)
def test_a_drain_leaves_no_more_time_than_by_the_clock_of_the_node(
    until: float, ahead: float | None, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray start --block` sets the deadline by that when it gets SIGTERM, others by that of the head."""
    now = time.time()
    monkeypatch.setattr(nodes, "draining", lambda: {"n0": now + until})
    monkeypatch.setattr(nodes.placement, "nodes", list)
    told: list[m.Event] = []
    about = {"options": {"num_cpus": 1}, "heartbeat_interval": 0.25, "heartbeat_timeout": 0.7}
    heed: Any = SimpleNamespace(**about, notices=NoticeSpec(clouds=(), detect=False, drain=True, grace_s=None))
    contacts = Contacts(heed)
    contacts.placed["w0"] = "n0"
    health = Health(heed, told.append, lambda: 1.0, contacts)
    if ahead is not None:
        health.heard(Beat("w0", 1, 0, "idle", "", "", 0, "setup", 0.1, (), clock=now + ahead))

    async def play() -> None:
        watch = asyncio.create_task(health.nodes.watch(lambda: ["w0"]))
        for _ in range(500):
            if told:
                break
            await asyncio.sleep(0.01)
        watch.cancel()

    asyncio.run(play())
    assert isinstance(told[0], m.Noticed)
    assert left - 5.0 < told[0].deadline_s <= left + 1.0


def test_maintenance_of_a_google_machine_may_come_an_hour_later_and_is_no_preemption() -> None:
    """A machine with GPUs has an hour from the same word for which others have a minute: it is no refuge until then."""
    told: list[m.Event] = []
    clock = [0.0]
    board = NoticeBoard(told.append, lambda: clock[0])
    with Gce() as server:
        gcp = Gcp(Metadata(server.url))
        server.values["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
        (maintenance,) = gcp.poll()
        server.values["preempted"] = "TRUE"
        (preempted,) = gcp.poll()
    board.noticed("w0", "n0", maintenance)
    clock[0] = 600.0
    assert board.condemned() == {"n0"}
    (noticed,) = [event for event in told if isinstance(event, m.Noticed)]
    restarted = NoticeBoard(told.append, lambda: clock[0])
    restarted.recall(noticed, "n0")
    assert restarted.condemned() == {"n0"}
    clock[0] = 3661.0
    assert board.condemned() == set(), "nobody took it away"
    board.noticed("w1", "n0", maintenance)
    board.noticed("w1", "n0", preempted)
    assert [(e.member, e.source) for e in told if isinstance(e, m.Noticed)] == [("w0", "gcp maintenance"), ("w1", "gcp")]


@pytest.mark.parametrize("listed", [False, True], ids=["not listed any more", "still listed"])
def test_a_reboot_that_did_not_come_hides_no_preemption(listed: bool) -> None:
    told: list[m.Event] = []
    clock = [0.0]
    board = NoticeBoard(told.append, lambda: clock[0])
    with AzureVm("gpu-set_3") as server:
        azure = Azure(Metadata(server.url))
        overdue = [event("Reboot", "gpu-set_3", seconds=-100)] if listed else []
        preempt = event("Preempt", "gpu-set_3", seconds=30)
        for events, at in (([event("Reboot", "gpu-set_3")], 0.0), ([*overdue, preempt], 400.0)):
            server.events, clock[0] = events, at
            for notice in azure.poll():
                board.noticed("w0", "n0", notice)
    assert [e.source for e in told if isinstance(e, m.Noticed)] == ["azure reboot", "azure preempt"]


def test_advice_that_nothing_came_of_hides_no_interruption() -> None:
    """A worker that was started there later hears the advice anew, and takes it for more urgent than what comes after it."""
    told: list[m.Event] = []
    clock = [0.0]
    about: Any = SimpleNamespace(heartbeat_interval=1.0)
    contacts = Contacts(about)
    contacts.placed |= {"w0": "n0", "w1": "n0"}
    health = Health(about, told.append, lambda: clock[0], contacts)

    def hears(member: str, *notices: Notice) -> None:
        preemption = Preemption(spec("aws"), lambda *_: None)
        for notice in notices:
            preemption._take(notice)
        beating = Heartbeat(member, SimpleNamespace(heartbeat_interval=1.0), None, preemption.notices)  # pyright: ignore
        health.heard(beating._beat())

    advice = Notice(120.0, "aws rebalance", "advice")
    hears("w0", advice)
    clock[0] = 120.0 + LAPSE_AFTER_S
    hears("w1", advice)
    clock[0] += 30.0
    hears("w1", replace(advice, deadline_s=90.0), Notice(120.0, "aws spot", "terminate"))
    assert [(e.member, e.source) for e in told if isinstance(e, m.Noticed)] == [("w0", "aws rebalance"), ("w1", "aws spot")]
