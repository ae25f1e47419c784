"""AWS: interruption of a spot instance, two minutes ahead unless it hibernates, and recommendations to rebalance, often earlier
(IMDSv2).

"Spot Instance interruption notices" and "EC2 instance rebalance recommendations" in the EC2 user guide. Both paths answer 404
as long as there is nothing to tell.
"""

from __future__ import annotations

import time
from typing import Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ValidationError

from raytrain_ft.errors import MetadataError
from raytrain_ft.runtime.notices.metadata import Metadata, Reply
from raytrain_ft.runtime.notices.notice import Notice, seconds_until

TOKEN_PATH = "/latest/api/token"
TOKEN_S = 6 * 3600
"""How long a token is asked for; it is renewed at half of that."""
LONGEST_TOKEN = 512
SPOT_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
SPOT_NOTICE_S = 120.0
"""A spot instance has two minutes from its notice; after a recommendation it has at least these."""


Model = TypeVar("Model", bound=BaseModel)


class _Action(BaseModel):
    action: Literal["terminate", "stop", "hibernate"]
    time: AwareDatetime


class _Recommendation(BaseModel):
    noticeTime: AwareDatetime


class Aws:
    """The metadata of an EC2 instance."""

    name = "aws"

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._token = ""
        self._renew_at = 0.0

    def detect(self) -> bool:
        """Whether the service issues session tokens, as only AWS's does."""
        self._renew()
        return True

    def poll(self) -> list[Notice]:
        """An interruption if there is one, else a recommendation."""
        reply = self._get(SPOT_PATH)
        if reply.status != 404:
            action = _parse(_Action, reply)
            reason = f"the spot instance will {action.action} at {action.time.isoformat()}"
            left = 0.0 if action.action == "hibernate" else seconds_until(action.time, SPOT_NOTICE_S)  # that begins at once
            return [Notice(left, "aws spot", reason)]
        reply = self._get(REBALANCE_PATH)
        if reply.status != 404:
            noticed = _parse(_Recommendation, reply).noticeTime
            return [Notice(SPOT_NOTICE_S, "aws rebalance", f"rebalancing recommended since {noticed.isoformat()}")]
        return []

    def _get(self, path: str) -> Reply:
        if time.monotonic() > self._renew_at:
            self._renew()
        reply = self._metadata.get(path, {"X-aws-ec2-metadata-token": self._token})
        if reply.status == 401:  # the token is not known any more
            self._renew()
            reply = self._metadata.get(path, {"X-aws-ec2-metadata-token": self._token})
        return reply

    def _renew(self) -> None:
        seconds = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
        token = self._metadata.ask("PUT", TOKEN_PATH, seconds).text()
        if not token or len(token) > LONGEST_TOKEN or not token.isascii() or not token.isprintable():
            raise MetadataError(f"{TOKEN_PATH}: no token, but {token[:40]!r}")
        self._token, self._renew_at = token, time.monotonic() + TOKEN_S / 2


def _parse(model: type[Model], reply: Reply) -> Model:
    text = reply.text()
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise MetadataError(f"no {model.__name__.strip('_').lower()}: {text[:80]!r}") from error
