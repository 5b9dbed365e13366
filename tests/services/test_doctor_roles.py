"""What the doctor says of prefill and decode groups."""

from pathlib import Path

from deepmesh.config import (
    Config,
    ExecutorConfig,
    KvstoreConfig,
    MeshConfig,
    RouterConfig,
    SchedulerConfig,
)
from deepmesh.handover_checks import check_handovers


def split(folder: Path, *, handover_bytes: int = 1 << 20, shared: str = "") -> Config:
    return Config(
        mesh=MeshConfig(run_dir=str(folder)),
        router=RouterConfig(count=1),
        scheduler=SchedulerConfig(count=3, roles=["prefill", "decode", "decode"]),
        executor=ExecutorConfig(handover_bytes=handover_bytes),
        kvstore=KvstoreConfig(shared_dir=shared or str(folder / "shared")),
    )


def test_it_counts_the_roles_and_the_room_for_prompts(tmp_path: Path) -> None:
    roles, room = check_handovers(split(tmp_path))
    assert (roles.state, roles.found) == ("ok", "2 decode, 1 prefill")
    assert (room.state, room.found[:12]) == ("ok", "1 MiB wanted")


def test_it_warns_where_there_is_less_memory_than_prompts_may_take(tmp_path: Path) -> None:
    _, room = check_handovers(split(tmp_path, handover_bytes=1 << 46))
    assert room.state == "warn"
    assert "executor.handover_bytes" in room.next_step


def test_it_warns_where_prompts_travel_in_messages(tmp_path: Path) -> None:
    _, room = check_handovers(split(tmp_path, shared="off"))
    assert (room.state, room.next_step) == ("warn", "mount a tmpfs, or set kvstore.shared_dir")


def test_groups_that_do_both_need_nothing(tmp_path: Path) -> None:
    assert not list(check_handovers(Config(mesh=MeshConfig(run_dir=str(tmp_path)))))
