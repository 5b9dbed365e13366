"""One group computes the prompts, another one the answers: real processes, real pulls."""

import dataclasses
from contextlib import ExitStack

from msgspec.structs import replace

from bench.determinism.groups import Outputs, Setting, scheduler_config
from bench.determinism.mesh import Client, process, to_toml
from deepmesh.config import Config, LinksConfig, MeshConfig, RouterConfig, TelemetryConfig
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.sockets import Dialer, Identity

GROUP = "prefill_decode_split"
PREFILLER = "scheduler-1"
MOST_JOBS = 40


def split_group(setting: Setting) -> Outputs:
    """The prompts come from the other group, as far as they are longer than a chunk.

    Nobody routes here: each request says who computes its prompt, as a router would.
    """
    folder = setting.run_dir / "split"
    folder.mkdir()
    config = Config(
        mesh=MeshConfig(run_dir=str(folder), model=str(setting.model)),
        links=LinksConfig(),
        router=RouterConfig(count=1),
        scheduler=replace(
            scheduler_config(prefix_cache=True), count=2, roles=["decode", "prefill"]
        ),
        telemetry=TelemetryConfig(enabled=False),
        executor=setting.config().executor,
    )
    file = folder / "mesh.toml"
    file.write_text(to_toml(config))
    jobs = [
        dataclasses.replace(job, generate=replace(job.generate, prefill_at=PREFILLER))
        for job in list(setting.jobs)[:MOST_JOBS]
    ]
    with ExitStack() as stack:
        for index in range(2):
            stack.enter_context(process("scheduler", file, index))
            stack.enter_context(process("executor", file, index))
        for index in range(2):
            _wait_ready(config, index)
        client = Client(config, setting, jobs)
        try:
            client.run(lambda: client.is_done)
            client.settle()
        finally:
            client.inbox.close()
    assert client.stats is not None
    seen = client.stats.handovers
    assert seen.loaded > 0, f"no prompt came from the other group: {seen}"
    return client.outputs


def _wait_ready(config: Config, index: int) -> None:
    """Until this scheduler says that its engine is loaded."""
    me = Identity.new("operator", f"operator-{index}", config)
    link = Dialer(config.scheduler_address(index), me, config.links)
    inbox = Inbox(link)
    try:
        while link.peer is None or not link.peer.stats.ready:
            inbox.wait(0.5)
    finally:
        inbox.close()
