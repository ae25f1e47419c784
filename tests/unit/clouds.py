"""Metadata services of AWS, Google Cloud and Azure on 127.0.0.1: real HTTP servers that insist on the real protocols."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import psutil


class Server:
    """One server; `handle(request)` answers."""

    def __init__(self, handle: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.requests: list[str] = []

        def answer(request: BaseHTTPRequestHandler) -> None:
            self.requests.append(f"{request.command} {request.path}")
            try:
                handle(request)
            except (BrokenPipeError, ConnectionResetError):
                request.close_connection = True  # the client has had enough

        class Handler(BaseHTTPRequestHandler):
            do_GET = do_PUT = do_POST = answer
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()


def reply(request: BaseHTTPRequestHandler, status: int, body: str = "", **headers: str) -> None:
    """One complete answer."""
    content = body.encode()
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    request.wfile.write(content)


class Ec2(Server):
    """IMDSv2 with tokens required. `spot` and `rebalance` are documents, or None as long as there is no notice.

    On one machine all workers ask the same service; a notice is for the process `machine` alone, if that is set.
    """

    def __init__(self) -> None:
        self.spot: str | None = None
        self.rebalance: str | None = None
        self.machine: int | None = None
        self.tokens: set[str] = set()
        super().__init__(self._answer)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        if request.path == "/latest/api/token":
            seconds = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if request.command != "PUT" or "X-Forwarded-For" in request.headers:
                return reply(request, 403 if request.command == "PUT" else 405)
            if not seconds.isdigit() or not 1 <= int(seconds) <= 21600:
                return reply(request, 400)
            self.tokens.add(token := secrets.token_urlsafe(40))
            return reply(request, 200, token)
        if request.headers.get("X-aws-ec2-metadata-token") not in self.tokens:
            return reply(request, 401)
        documents = {
            "/latest/meta-data/spot/instance-action": self.spot,
            "/latest/meta-data/events/recommendations/rebalance": self.rebalance,
        }
        document = documents.get(request.path) if self._is_for(request) else None
        return reply(request, 404, "<html>404 - Not Found</html>") if document is None else reply(request, 200, document)

    def _is_for(self, request: BaseHTTPRequestHandler) -> bool:
        if self.machine is None:
            return True
        try:
            connections = psutil.Process(self.machine).net_connections("tcp")
        except psutil.NoSuchProcess:
            return False
        return any(c.laddr.port == request.client_address[1] for c in connections)


class Gce(Server):
    """Google's: refuses whoever does not show the Metadata-Flavor, and shows its own."""

    def __init__(self) -> None:
        self.values = {"id": "4520031799277581759", "preempted": "FALSE", "maintenance-event": "NONE"}
        super().__init__(self._answer)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        value = self.values.get(request.path.removeprefix("/computeMetadata/v1/instance/"))
        if request.headers.get("Metadata-Flavor") != "Google":
            return reply(request, 403)
        return reply(request, 200 if value else 404, value or "", Metadata_Flavor="Google", Server="Metadata Server for VM")


class AzureVm(Server):
    """Azure's: needs the header and an api-version; questions for events are answered when `answers` is set."""

    def __init__(self, name: str = "gpu-set_3") -> None:
        self.name = name
        self.events: list[dict[str, object]] = []
        self.answers = threading.Event()
        self.answers.set()
        super().__init__(self._answer)

    def __exit__(self, *error: Any) -> None:
        self.answers.set()
        super().__exit__(*error)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path, _, query = request.path.partition("?")
        if request.headers.get("Metadata") != "true" or "api-version=" not in query:
            return reply(request, 400, '{"error": "Bad request. api-version or Metadata header is missing"}')
        if path == "/metadata/instance/compute":
            return reply(request, 200, json.dumps({"name": self.name, "azEnvironment": "AzurePublicCloud", "vmId": "1-2"}))
        if path == "/metadata/scheduledevents":
            self.answers.wait()
            return reply(request, 200, json.dumps({"DocumentIncarnation": 2, "Events": self.events}))
        return reply(request, 404)
