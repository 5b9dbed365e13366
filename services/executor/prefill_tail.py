"""How much of a prompt has to pass the layers that leave nothing behind but window rows. No torch.

Layers from the last KV source on read compressed rows that exist once the layers below are done.
What others need of them are the window rows before a position that is kept, and its logits.
"""

from services.executor.model_config import ModelConfig


def can_leave_out(config: ModelConfig) -> bool:
    """Whether everything else that lasts is written below the upper layers."""
    first, count = config.candidate_source_layer_id, config.num_hidden_layers
    others = [*config.kv_source_layer_ids, *config.engram_layer_ids]
    targets = config.dspark_target_layer_ids if config.num_stages else ()
    return (
        0 < first < count
        and first in config.kv_source_layer_ids
        and max(others) <= first
        and min(targets, default=count) > first
    )


def exact_halo(config: ModelConfig) -> int:
    """Positions before an end that must pass all layers, so that its last window of rows is exact
    in every layer, and so are the logits before it; 0: no layer can be left out.

    A row reads W - 1 rows before it in each layer: what is wrong at one position is wrong W - 1
    further in the next layer.
    """
    if not can_leave_out(config):
        return 0
    window, upper = config.sliding_window, config.num_hidden_layers
    return window + (upper - config.candidate_source_layer_id - 1) * (window - 1)


def bounded_halo(config: ModelConfig) -> int:
    """The same where rows of the upper layers see no window row before the first of them: as many
    as a later row reads. What comes of it is near the exact rows, and not the same."""
    return config.sliding_window if can_leave_out(config) else 0
