"""A group of GPUs: a process and a device a rank, without moves of experts and with them."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import torch
from msgspec.structs import replace

from bench.determinism.groups import MOVES_OFTEN, Outputs, Setting, scheduler_config
from bench.determinism.mesh import ROOT, Client, end, process, to_toml
from deepmesh.config import Config, LinksConfig, MeshConfig, TelemetryConfig

RANKS = 2


def can_run(setting: Setting) -> bool:
    """Ranks on CPUs run within the check's own process; on a host it takes long."""
    return setting.device == "cuda" and not setting.on_host and torch.cuda.device_count() >= RANKS


def rank_groups(setting: Setting) -> Iterator[tuple[str, Outputs]]:
    """Each group with what came of its run; none without GPUs for all ranks."""
    if not can_run(setting):
        return
    yield f"ranks_{RANKS}", on_ranks(setting, "ranks")
    yield f"eplb_move_ranks_{RANKS}", on_ranks(setting, "moves", moves=True)


def on_ranks(setting: Setting, name: str, *, moves: bool = False, device: str = "") -> Outputs:
    """All jobs through a scheduler and an executor for each rank.

    Args:
        moves: experts change their ranks, layer by layer, meanwhile.
        device: other than the setting's: "host" needs no GPU.
    """
    folder = setting.run_dir / name
    folder.mkdir()
    executor = setting.config(ranks=RANKS).executor
    if device == "host":
        executor = replace(executor, device="host")
    scheduler = scheduler_config()
    if moves:
        executor = replace(executor, redundant_experts=RANKS)
        scheduler = replace(scheduler, **MOVES_OFTEN)
    config = Config(
        mesh=MeshConfig(run_dir=str(folder), model=str(setting.model)),
        links=LinksConfig(),
        scheduler=scheduler,
        telemetry=TelemetryConfig(enabled=False),
        executor=executor,
    )
    file = folder / "mesh.toml"
    file.write_text(to_toml(config))
    with process("scheduler", file), ExitStack() as stack:
        for rank in range(RANKS):
            command = [sys.executable, "-m", "services.executor", "--config", str(file)]
            with (folder / f"executor-{rank}.log").open("ab") as log:
                child = subprocess.Popen(
                    [*command, "--rank", str(rank)], cwd=ROOT, stdout=log, stderr=log
                )
            stack.callback(end, child)
        client = Client(config, setting)
        try:
            client.run(lambda: client.is_done)
            client.settle()
        finally:
            client.inbox.close()
    assert client.stats is not None
    if moves:
        experts = client.stats.experts
        assert experts.moves > experts.placements > 0, "no expert was moved"
    return client.outputs
