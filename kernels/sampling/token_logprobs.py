"""Log-probabilities of the drawn tokens and of the best ones."""

from torch import Tensor

from kernels.sampling.order_key import key_ids, order_key


def token_logprobs(logits: Tensor, ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities under softmax(logits) of `ids` and of the `num_top` best ids.

    Args:
        logits: [rows, num_ids], float32, finite.
        ids: [rows], int64.
        num_top: 0 <= num_top <= num_ids.
    Returns:
        logprobs: of `ids`, [rows], float32.
        top_ids: [rows, num_top], int64, best first; a tie goes to the lower id.
        top_logprobs: [rows, num_top], float32.
    Error against token_logprobs_ref: ids equal, values within 1e-5.
    """
    if not 0 <= num_top <= logits.shape[1]:
        raise ValueError(f"num_top: {num_top} is not between 0 and {logits.shape[1]}")
    table = logits.log_softmax(dim=1)
    top_ids = key_ids(order_key(logits).topk(num_top, dim=1).values)
    return table.gather(1, ids[:, None])[:, 0], top_ids, table.gather(1, top_ids)
