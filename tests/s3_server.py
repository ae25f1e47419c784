"""A real server of S3's protocol, on the loopback device."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUCKET = "bucket"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def uri(port: int, path: str, bucket: str = BUCKET) -> str:
    return f"s3://key:secret@{bucket}/{path}?scheme=http&endpoint_override=127.0.0.1:{port}&region=us-east-1"


@contextmanager
def s3_server(folder: Path) -> Iterator[int]:
    """The port of a server that holds one bucket; its log goes to the folder."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            _make_bucket(process, port, folder / "log")
            yield port
        finally:
            process.kill()
            process.wait()


def _make_bucket(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
            urllib.request.urlopen(request, timeout=5).close()
            return
        except (OSError, urllib.error.URLError):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.2)
