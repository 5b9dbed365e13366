"""The one way to say no to a request before it reaches a queue."""

from deepmesh.wire.messages import ErrorCode

MAX_DETAIL = 2000  # characters: it goes into an answer, spans and logs
MAX_PARAM = 200


class Refusal(Exception):
    """The request is at fault: becomes `ResponseFailed`, which the gateway shapes.

    Attributes:
        code: decides the HTTP status.
        detail: what is wrong and what to send instead.
        retry_after_s: when it may fare better; 0: never, as it is.
        param: path of the field at fault, such as `messages[0].content[1].type`; may be empty.
    """

    def __init__(
        self,
        detail: str,
        param: str = "",
        code: ErrorCode = ErrorCode.INVALID,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(_short(detail, MAX_DETAIL))
        self.code = code
        self.detail = _short(detail, MAX_DETAIL)
        self.param = _short(param, MAX_PARAM)
        self.retry_after_s = retry_after_s


def _short(text: str, most: int) -> str:
    """What a client sent may be quoted in it, and be of any length."""
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"
