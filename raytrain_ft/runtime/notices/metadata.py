"""A client for the metadata service of a cloud's machine, which trusts it with nothing.

One deadline and one limit of bytes hold for a whole conversation, headers included, so a service that trickles, floods or
never ends costs neither time nor memory. Redirects are not followed, proxies are not asked, nothing is unpacked.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from raytrain_ft.errors import ConfigError, MetadataError

ENDPOINT = "http://169.254.169.254"
"""Where AWS, Google Cloud and Azure alike have it."""
ENDPOINT_VARIABLE = "RAYTRAIN_FT_METADATA_ENDPOINT"
"""Environment of a worker: another endpoint, for tests and drills."""
AWS_IPV6 = ipaddress.ip_address("fd00:ec2::254")
DEADLINE_S = 1.0
MOST_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def text(self) -> str:
        """The body as words.

        Raises:
            MetadataError: the status is not 200, or the body is no text.
        """
        if self.status != 200:
            raise MetadataError(f"status {self.status}, where 200 was expected")
        try:
            return self.body.decode().strip()
        except UnicodeDecodeError as error:
            raise MetadataError(f"not text: {self.body[:40]!r}") from error


class Metadata:
    """The service at one endpoint.

    Raises:
        ConfigError: the endpoint is none that a machine's own metadata could have.
    """

    def __init__(self, endpoint: str = ENDPOINT) -> None:
        self._host, self._port = _parse(endpoint)

    @classmethod
    def of_this_machine(cls) -> Metadata:
        """At the usual place, or where the environment says."""
        return cls(os.environ.get(ENDPOINT_VARIABLE, ENDPOINT))

    def get(self, path: str, headers: Mapping[str, str], deadline_s: float = DEADLINE_S) -> Reply:
        """Asks for a path.

        Raises:
            MetadataError: no complete answer within the deadline and the limit of bytes.
        """
        return self.ask("GET", path, headers, deadline_s)

    def ask(self, method: str, path: str, headers: Mapping[str, str], deadline_s: float = DEADLINE_S) -> Reply:
        """As `get`, with any method."""
        connection = http.client.HTTPConnection(self._host, self._port)
        try:
            connection.sock = _GuardedSocket.connected(self._host, self._port, deadline_s)
            connection.request(method, path, headers=dict(headers))
            answer = connection.getresponse()
            body = answer.read(MOST_BYTES)  # never more at once than that, whatever length the headers promise
            if answer.length:
                raise OSError(f"the answer lacks {answer.length} bytes")
            return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            what = f"{type(error).__name__}: {error}"[:200]
            raise MetadataError(f"{method} {path} at {self._host}:{self._port}: {what}") from error
        finally:
            connection.close()


class _GuardedSocket(socket.socket):
    """A connection with one deadline, and one limit of bytes, for all that is received."""

    _until: float
    _left: int

    @classmethod
    def connected(cls, host: str, port: int, deadline_s: float) -> _GuardedSocket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self = cls(family, socket.SOCK_STREAM)
        self._until, self._left = time.monotonic() + deadline_s, MOST_BYTES
        try:
            self.settimeout(deadline_s)
            self.connect((host, port))
        except OSError:
            self.close()
            raise
        return self

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer was not complete in time")
        self.settimeout(left)
        count = super().recv_into(buffer, nbytes, flags)
        self._left -= count
        if self._left < 0:
            raise OSError(f"the answer is longer than {MOST_BYTES} bytes")
        return count


def _parse(endpoint: str) -> tuple[str, int]:
    """Host and port; only of this machine or of the link, so that no setting makes workers ask elsewhere."""
    try:
        url = urlsplit(endpoint)
        address = ipaddress.ip_address(url.hostname or "")
        port = url.port or 80
    except ValueError:
        address, port, url = None, 0, None
    if url is None or address is None or url.scheme != "http" or url.path.strip("/") or url.query or url.username:
        raise ConfigError(f"{ENDPOINT_VARIABLE}={endpoint!r}: use http://ADDRESS:PORT with an IP address, and nothing else")
    if not (address.is_loopback or address.is_link_local or address == AWS_IPV6):
        raise ConfigError(f"{ENDPOINT_VARIABLE}={endpoint!r}: only loopback and link-local addresses are asked")
    return str(address), port
