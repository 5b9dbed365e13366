"""Counters since the start and present levels of a kvstore, by name."""

from collections.abc import Sequence

from .blocks import BlockTiers
from .disk import DiskTier
from .records import RecordBook
from .shared import SharedTier


def levels(tiers: BlockTiers, disks: Sequence[DiskTier], records: RecordBook) -> dict[str, int]:
    """Of what is here. `*_hit_blocks` are blocks of lookups by the tier that has them."""
    store = tiers.store
    return {
        **tiers.counters,
        **{f"{tier.name.lower()}_hit_blocks": count for tier, count in store.hits.items()},
        "memory_bytes": store.memory.used,
        "memory_max_bytes": store.memory.budget,
        "memory_held_bytes": store.memory.held_bytes,
        "memory_items": len(store.memory),
        "disk_bytes": store.disk.used,
        "disk_max_bytes": store.disk.budget,
        "disk_items": len(store.disk),
        "disk_file_bytes": sum(disk.num_bytes for disk in disks),
        "disk_damaged": sum(disk.counters["damaged"] for disk in disks),
        "records": len(records),
        "record_bytes": records.num_bytes,
    }


def shared_values(shared: SharedTier) -> dict[str, int]:
    """Of what is shared; items and bytes are those of all kvstores together."""
    items, num_bytes = shared.usage
    return {
        **shared.counters,
        "shared_up": int(shared.is_up),
        "shared_items": items,
        "shared_bytes": num_bytes,
    }
