"""Writes compose.gpu.yaml and mesh.gpu.toml for as many GPUs as a host has.

`python3 compose/gpus.py --replicas 4` is four executors that answer each for itself, `--ranks 4`
makes each a group of four that share the experts. Without any it is what the repository has.
"""

import argparse
import re
from pathlib import Path

HEAD = """\
# Made by `compose/gpus.py --replicas {replicas} --ranks {ranks}`: {gpus} executors on a GPU each.
#
#   docker compose -f compose/compose.yaml -f compose/compose.gpu.yaml up
#
# Needs an NVIDIA driver and the NVIDIA Container Toolkit on the host: `gpus` and `check` say so
# before anything else starts. GPU_0, GPU_1, … (numbers or UUIDs of nvidia-smi -L) and GPU_BASE (an
# image with nvcc for the kernels) may be set.

x-mesh: &mesh
  volumes: &config
    - ./mesh.gpu.toml:/etc/deepmesh/mesh.toml:ro

x-gpu: &gpu
  image: deepmesh/executor-gpu:${{DEEPMESH_TAG:-latest}}
  build:
    context: ..
    dockerfile: compose/Dockerfile
    target: executor
    args:
      BASE: ${{GPU_BASE:-pytorch/pytorch:2.11.0-cuda13.0-cudnn9-devel}}
      TORCH: torch==2.11.* safetensors>=0.4
      TORCH_INDEX: https://download.pytorch.org/whl/cu130
      CUDA: "1"
  ipc: host                 # ranks of a host, and kvstores, map memory of each other
  shm_size: 16gb            # where an engine gives the container an ipc namespace of its own
  ulimits:
    memlock: -1             # pinned memory: Engram's tables, rings of inputs and results
    stack: 67108864
  environment:
    TORCH_SYMM_MEM_DISABLE_MULTICAST: "1"
    NCCL_NVLS_ENABLE: "0"
  volumes: *config

services:
  # Ends with an explanation on a host without GPUs or with an old driver; nothing is started then.
  gpus:
    image: deepmesh/operator:${{DEEPMESH_TAG:-latest}}
    entrypoint: [python3, -m, deepmesh.gpus, --least, "{gpus}"]
    read_only: true
    cap_drop: [ALL]
    security_opt: ["no-new-privileges:true"]
    network_mode: none

  # Sees the GPUs as executors do.
  check:
    image: deepmesh/executor-gpu:${{DEEPMESH_TAG:-latest}}
    volumes: *config
    depends_on:
      gpus:
        condition: service_completed_successfully
    deploy:
      resources:
        reservations:
          devices: [{{driver: nvidia, count: all, capabilities: [gpu]}}]

  gateway-0: *mesh
  tokenizer: *mesh
  router-0: *mesh
  kvstore-0: *mesh
  operator: *mesh
"""
SCHEDULER = """
  scheduler-{index}:
    <<: *mesh
"""
MORE_SCHEDULER = """
  scheduler-{index}:
    extends: {{file: compose.yaml, service: scheduler-1}}
    volumes: *config
    command: [--config, /etc/deepmesh/mesh.toml, --index, "{index}"]
    healthcheck:
      test: [CMD, python3, -m, deepmesh.health, scheduler-{index}, /etc/deepmesh/mesh.toml]
"""
EXECUTOR = """
  executor-{index}-{rank}:
    <<: *gpu
{more}    deploy:
      resources:
        reservations:
          devices:
            - driver: nvidia
              device_ids: ["${{GPU_{gpu}:-{gpu}}}"]
              capabilities: [gpu]
"""
MORE_EXECUTOR = """\
    extends: {{file: compose.yaml, service: executor-1-1}}
    command: [--config, /etc/deepmesh/mesh.toml, --index, "{index}", --rank, "{rank}"]
    healthcheck:
      test: [CMD, python3, -m, deepmesh.health, executor-{index}-{rank}, /etc/deepmesh/mesh.toml]
"""
OFF = """
  executor-{index}-{rank}:
    profiles: [ranks]       # a rank that only the mesh on CPUs has
"""
OFF_SCHEDULER = """
  scheduler-{index}:
    profiles: [replicas]
"""
NAMED = 2  # replicas, and ranks of each, that compose.yaml has


def compose(replicas: int, ranks: int) -> str:
    """The override for so many groups of so many executors."""
    text = HEAD.format(replicas=replicas, ranks=ranks, gpus=replicas * ranks)
    for index in range(max(replicas, NAMED)):
        if index >= replicas:
            text += OFF_SCHEDULER.format(index=index)
        else:
            text += (SCHEDULER if index < NAMED else MORE_SCHEDULER).format(index=index)
    for index in range(max(replicas, NAMED)):
        for rank in range(max(ranks, NAMED if index < NAMED else 0)):
            text += _executor(index, rank, replicas=replicas, ranks=ranks)
    return text + _networks(replicas, ranks)


def _executor(index: int, rank: int, *, replicas: int, ranks: int) -> str:
    if index >= replicas or rank >= ranks:
        return OFF.format(index=index, rank=rank)
    more = ""
    if index >= NAMED or rank >= NAMED:
        more = MORE_EXECUTOR.format(index=index, rank=rank)
        if ranks == 1:
            more += "    networks: !override [mesh]\n"
        elif rank == 0:
            group = f"group-{index}"
            more += f"    networks: !override {{mesh: {{}}, {group}: {{aliases: [{group}]}}}}\n"
        else:
            more += f"    networks: !override [mesh, group-{index}]\n"
    return EXECUTOR.format(index=index, rank=rank, gpu=index * ranks + rank, more=more)


def _networks(replicas: int, ranks: int) -> str:
    """Each further group of several ranks has a network of its own."""
    if ranks == 1 or replicas <= NAMED:
        return ""
    groups = [f"  group-{index}:\n    internal: true\n" for index in range(NAMED, replicas)]
    return "\nnetworks:\n" + "".join(groups)


def mesh(text: str, replicas: int, ranks: int) -> str:
    """A mesh.gpu.toml with these numbers instead of its own."""
    text = re.sub(r"(\[scheduler\]\ncount = )\d+", rf"\g<1>{replicas}", text)
    text = re.sub(r"\ngroup_address = .*", "", text)
    group = '\ngroup_address = "tcp://group-{index}:7400"' if ranks > 1 else ""
    return re.sub(r"\nranks = \d+", f"\nranks = {ranks}{group}", text)


def main() -> None:
    """Replace both files; what they say of models and limits is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2, help="groups of executors, 1 to 64")
    parser.add_argument("--ranks", type=int, default=1, help="executors of a group, 1 to 16")
    asked = parser.parse_args()
    if not (1 <= asked.replicas <= 64 and 1 <= asked.ranks <= 16):
        parser.error("1 to 64 replicas of 1 to 16 ranks")
    folder = Path(__file__).parent
    config = folder / "mesh.gpu.toml"
    config.write_text(mesh(config.read_text(), asked.replicas, asked.ranks))
    (folder / "compose.gpu.yaml").write_text(compose(asked.replicas, asked.ranks))
    print(f"compose.gpu.yaml, mesh.gpu.toml: {asked.replicas * asked.ranks} GPUs")


if __name__ == "__main__":
    main()
