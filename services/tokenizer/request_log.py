"""What became of each request, one line in the log at debug."""

import logging

from deepmesh.log import about
from deepmesh.wire.messages import Generate
from services.tokenizer.refusal import Refusal

_log = logging.getLogger(__name__)


def note_placement(name: str, request: Generate) -> None:
    """It goes to this scheduler; once for each of its choices."""
    _log.debug(
        "%s.%d -> %s: prompt=%d known=%d max_tokens=%d temperature=%g grammar=%s",
        request.rid.hex()[:12],
        request.sub_index,
        name,
        request.prompt_len,
        len(request.confirmed_ids) // 4,
        request.max_tokens,
        request.sampling.temperature,
        request.grammar.kind if request.grammar else "none",
        extra=about(request.rid, request.traceparent),
    )


def note_refusal(rid: bytes, refusal: Refusal) -> None:
    """It goes nowhere."""
    why = (refusal.code.name, refusal.param, refusal.detail)
    _log.debug("%s refused: %s %s %s", rid.hex()[:12], *why)
