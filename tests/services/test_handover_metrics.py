"""What `/metrics` says of hand-overs."""

from msgspec.structs import replace

from deepmesh.wire.messages import HandoverStats, ReplicaStats
from services.gateway.handover_metrics import handover_metrics


def test_both_sides_of_hand_overs_are_told() -> None:
    ours = HandoverStats(asked=9, loaded=7, failed=1, tokens=896, bytes=5000, wait_ns=2 * 10**9)
    ours = replace(ours, waits=[0, 0, 3, *[0] * 4, 4, *[0] * 5], pulls=[7, *[0] * 12])
    theirs = HandoverStats(served=7, refused=1, expired=1, held=2)
    replicas = [
        ReplicaStats("scheduler-0", True, role="prefill", handovers=theirs),
        ReplicaStats("scheduler-1", True, role="decode", handovers=ours),
    ]
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in handover_metrics(replicas)
        for sample in family.samples
    }
    assert samples["deepmesh_replica_role", "scheduler-1", "decode"] == 1
    assert samples["deepmesh_handovers_loaded_total", "scheduler-1"] == 7
    assert samples["deepmesh_handover_wait_seconds_sum", "scheduler-1"] == 2.0
    assert samples["deepmesh_handover_wait_seconds_bucket", "scheduler-1", "0.02"] == 3
    assert samples["deepmesh_handover_wait_seconds_bucket", "scheduler-1", "1.0"] == 7
    assert samples["deepmesh_handover_pull_seconds_count", "scheduler-1"] == 7
    assert ("deepmesh_handover_pull_seconds_count", "scheduler-0") not in samples
    assert samples["deepmesh_handovers_served_total", "scheduler-0"] == 7
    assert samples["deepmesh_handovers_held", "scheduler-0"] == 2


def test_a_mesh_whose_groups_do_both_says_nothing() -> None:
    assert not list(handover_metrics([ReplicaStats("scheduler-0", True)]))
