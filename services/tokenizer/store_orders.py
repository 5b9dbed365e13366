"""What preparing a request may ask of a kvstore, and of the engines, besides an answer."""

from typing import NamedTuple

from deepmesh.wire.messages import Rid

KIND = "response"  # of the records


class Wanted(NamedTuple):
    """The request cannot be prepared without this record: ask, and prepare it again."""

    id: str


class Keep(NamedTuple):
    """Put a record in the place of the one of this id."""

    id: str
    data: bytes


class Drop(NamedTuple):
    """Forget a record."""

    id: str
    kind: str = KIND


class Stop(NamedTuple):
    """End these requests, whichever engine has them."""

    rids: tuple[Rid, ...]


Order = Keep | Drop | Stop
