"""How many blocks and slots a device offers, and what identifies the results it gives. No torch."""

import hashlib
from pathlib import Path

from deepmesh import __version__
from deepmesh.config import Config
from deepmesh.wire.messages import Capacity, Load
from services.executor.model_config import BLOCK_TOKENS, ModelConfig

TYPICAL_TOKENS = 2048  # of one request: the default pools hold scheduler.max_rows of these
MAX_DEPTH = 3  # steps in flight
KEPT_POINTS = 4  # resumable points kept for each resident request
KEPT_CONTEXTS = 2  # of full length for each slot: one that runs, one kept for its prefix
MAX_GLOBAL_BLOCKS = 1 << 19  # 33 M tokens: a scheduler keeps some bytes for each
WHOLE_FILE_BYTES = 256 << 20  # larger files enter the fingerprint by size, head and tail


def planned_slots(config: Config) -> int:
    """Requests that a device can hold at once, those that wait for a fence included."""
    rows = config.scheduler.max_rows
    return config.executor.slots or rows + max(MAX_DEPTH, rows // 2)


MAX_VERIFIED = 512  # tokens of a step with drafts on a GPU, if it has fewer rows: more cannot pay


def verified_tokens(max_rows: int, draft_len: int) -> int:
    """Tokens of a GPU step's decode rows with their drafts, at most."""
    return min(max_rows * (1 + draft_len), max(MAX_VERIFIED, max_rows))


def plan_capacity(
    config: Config,
    model: ModelConfig,
    order: Load,
    *,
    bytes_per_block: tuple[int, int, int] = (0, 0, 0),
    memory_bytes: int = 0,
    fills: bool = False,
    draft_len: int = 0,
    prefill_halo: int = 0,
) -> Capacity:
    """Pool sizes: those of [executor], or enough for `max_rows` requests of typical length.

    Args:
        bytes_per_block: of each pool, where memory is a limit.
        memory_bytes: what the pools may take; defaults are lowered to it, 0 is no limit.
        fills: whatever that leaves becomes global blocks, as many as could be of use.
        draft_len: drafts that are verified with each token.
        prefill_halo: see Capacity.
    Raises:
        ValueError: the pools cannot hold a single request of full length.
    """
    rows, executor = config.scheduler.max_rows, config.executor
    max_len = min(model.max_model_len, config.scheduler.max_model_len or model.max_model_len)
    per_request = -(-min(max_len, TYPICAL_TOKENS) // BLOCK_TOKENS)
    num_slots = planned_slots(config)
    least_global = -(-max_len // BLOCK_TOKENS)
    reach = MAX_DEPTH * (1 + draft_len)  # positions in flight of a request that decodes
    window_span = -(-(model.sliding_window + reach) // BLOCK_TOKENS) + 1
    in_flight = MAX_DEPTH * config.scheduler.step_tokens // BLOCK_TOKENS
    global_blocks = max(rows * per_request, least_global)
    window_blocks = rows * (window_span + KEPT_POINTS) + in_flight
    state_blocks = num_slots + rows * KEPT_POINTS
    needed = global_blocks * bytes_per_block[0] + window_blocks * bytes_per_block[1]
    if memory_bytes and needed > memory_bytes:
        share = memory_bytes / needed
        global_blocks, window_blocks = int(global_blocks * share), int(window_blocks * share)
    elif fills:
        useful = min(MAX_GLOBAL_BLOCKS, KEPT_CONTEXTS * num_slots * least_global)
        more = (memory_bytes - needed) // bytes_per_block[0]
        global_blocks = max(global_blocks, min(useful, global_blocks + more))
    global_blocks = executor.global_blocks or global_blocks
    window_blocks = executor.window_blocks or window_blocks
    if global_blocks < 1 or window_blocks < window_span:
        raise ValueError(
            f"executor.global_blocks = {global_blocks}, executor.window_blocks = {window_blocks}: "
            f"a request needs 1 and {window_span} at least"
        )
    return Capacity(
        order.engine_epoch,
        order.rank,
        num_global_blocks=global_blocks,
        num_window_blocks=window_blocks,
        num_state_blocks=state_blocks,
        num_slots=num_slots,
        max_model_len=min(max_len, global_blocks * BLOCK_TOKENS),
        vocab_size=model.vocab_size,
        window=model.sliding_window,
        block_size=BLOCK_TOKENS,
        draft_len=draft_len,
        prefill_halo=prefill_halo,
    )


def fingerprint(model: Path, numerics: str, engine: str) -> str:
    """WEIGHTS.ENGINE: hashes of the checkpoint's files, and of what else the results depend on."""
    how = hashlib.sha256(f"{engine} {__version__} {numerics}".encode())
    digest = hashlib.sha256()
    for file in sorted([*model.glob("*.json"), *model.glob("*.safetensors")]):
        size = file.stat().st_size
        digest.update(f"\n{file.name} {size} ".encode())
        with file.open("rb") as stream:
            if size <= WHOLE_FILE_BYTES:
                digest.update(stream.read())
            else:
                digest.update(stream.read(1 << 20))
                stream.seek(-(1 << 20), 2)
                digest.update(stream.read())
    return f"{digest.hexdigest()[:9]}.{how.hexdigest()[:6]}"
