"""Which texts are too long for sure: told from their size, before the work of encoding them."""

from deepmesh.wire.messages import ErrorCode
from services.tokenizer.refusal import Refusal


class Room:
    """The context of the moment, and how many bytes could at most fit into it."""

    def __init__(self, context: int, max_token_bytes: int | None) -> None:
        """`max_token_bytes`: no token stands for more; None: unknown, nothing is refused here."""
        self._context = context
        self._max_token_bytes = max_token_bytes

    def may_exceed(self, num_bytes: int) -> bool:
        """Whether a text of this size is worth a look."""
        most = self._max_token_bytes
        return most is not None and num_bytes > self._context * most

    def check(self, text: str, param: str) -> None:
        """Refuse what cannot fit however well it encodes: 7 MB of digits take 13 s to encode.

        Raises:
            Refusal: TOO_LONG.
        """
        if self._max_token_bytes is None:
            return
        num_tokens = -(-len(text.encode("utf-8", "replace")) // self._max_token_bytes)
        if num_tokens >= self._context:
            raise Refusal(
                f"The prompt has at least {num_tokens} tokens, probably many more; prompt and "
                f"answer together may have {self._context}. Shorten the prompt.",
                param,
                ErrorCode.TOO_LONG,
            )
