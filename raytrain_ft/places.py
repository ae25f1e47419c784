"""Paths and URIs, and what may be told of them.

A URI may hold the keys of a bucket, or a password. What is told is read by others than those who may use them: errors, a job's
log, the records of a run. So a URI travels as a `Place`, which leaves them out wherever it becomes words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

KIND = "[A-Za-z][A-Za-z0-9+.-]*"
URI = re.compile(rf"({KIND})(:/{{1,2}})([^?]*)(?:\?(.*))?", re.DOTALL)
"""Its kind, what follows that, server and path, options. One slash too few is how pathlib writes it."""
URI_IN_WORDS = re.compile(rf"(?<='){KIND}:/[^']*(?=')|{KIND}:/\S*[^\s.,;:)]")
"""Between quotes it may have spaces; elsewhere it ends where the sentence does."""
SERVER = re.compile(r"(?:\[[^\]]*\]|[^:]*)(?::[0-9]*)?")
"""With or without a port. What is more is a password, of a URI that is none: its "/" should have been "%2F"."""
USERS = ("abfs", "abfss", "gs", "gcs", "hdfs", "viewfs")
"""Kinds of URI whose user is no secret, and part of the place: a container, an account, "anonymous"."""
OPTION = re.compile(
    "(?:region|scheme|endpoint_override|project_id|user|credential_kind|enable_tls|(?:blob|dfs)_storage_authority|"
    "tls_(?:ca_file_path|ca_dir_path|verify_certificates))=[^@]*"
)
"""What `pyarrow.fs` must know of a place and is no secret. Whatever else a URI says after "?" may be one: a password, a
signature; without it, the rest of what it belongs to is of no use either."""


@dataclass(frozen=True, slots=True, repr=False)
class Place:
    """A path or URI that something is kept at. In words, and only there, it is without credentials."""

    with_credentials: str

    def __str__(self) -> str:
        return without_credentials(self.with_credentials)

    def __repr__(self) -> str:
        return repr(str(self))

    def told(self, words: str) -> str:
        """What others say of it, without its credentials and those of other URIs that they name."""
        return told(words.replace(self.with_credentials, str(self)))


def without_credentials(place: str) -> str:
    """The same path or URI without what may be secret: user and password, and options that are not known. It names the same
    place to who has credentials from elsewhere. Of a URI that is none, nothing is left where a password may be."""
    found = URI.fullmatch(place)
    if found is None or found[1] == "file":
        return place
    kind, mark, where, options = found.groups()
    server, slash, path = where.partition("/")
    account, at, host = server.rpartition("@")
    user = account.partition(":")[0] if kind in USERS else ""
    if not at and (not SERVER.fullmatch(server) or (kind == "s3" and ":" in server)):
        return f"{kind}{mark}***"
    known = "&".join(option for option in (options or "").split("&") if OPTION.fullmatch(option))
    return f"{kind}{mark}{user}{'@' * bool(user)}{host}{slash}{path}{'?' * bool(known)}{known}"


def told(words: str) -> str:
    """What others say, without the credentials of the URIs that they name."""
    return URI_IN_WORDS.sub(lambda found: without_credentials(found[0]), words)
