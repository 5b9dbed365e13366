"""A real prefill group and a real decode group: the bits are those of one group."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from msgspec.structs import replace

from deepmesh.run_dir import tail
from deepmesh.supervisor import Mesh
from deepmesh.telemetry import (
    SPAN_DECODE,
    SPAN_HAND_OVER,
    SPAN_QUEUE,
    new_traceparent,
    trace_id_of,
)
from deepmesh.waterfall import Span, read_spans
from deepmesh.wire import messages as m
from tests.e2e.conftest import until
from tests.e2e.rank_mesh import MODEL, VOCAB, Bits, mixed, outcome
from tests.e2e.wire_client import WireClient

PREFILLER = "scheduler-0"
CONFIG = """
[mesh]
name = "split"
run_dir = "{run_dir}"
model = "{model}"
[links]
heartbeat_s = 0.3
timeout_s = 3.0
[gateway]
port = 0
[router]
count = 1
[scheduler]
count = 2
roles = ["prefill", "decode"]
max_rows = 10
step_tokens = 512
audit = true
store_load_s = 20.0
handover_ttl_s = 3.0
[executor]
ranks = {ranks}
draft_tokens = {drafts}
draft_policy = "always"
handover = "{handover}"
handover_bytes = 67108864
[kvstore]
shared_dir = "{shared}"
[supervisor]
backoff_s = 0.1
"""


@contextmanager
def start(
    folder: Path, *, ranks: int = 1, shared: str = "", drafts: int = 0, handover: str = "host"
) -> Iterator[Mesh]:
    """A mesh of two groups; the ends of its logs are shown with a failure."""
    path = folder / "mesh.toml"
    places = {"run_dir": folder / "run", "model": MODEL, "shared": shared, "handover": handover}
    path.write_text(CONFIG.format(**places, ranks=ranks, drafts=drafts))
    with Mesh(path) as mesh:
        try:
            yield mesh
        except BaseException as error:
            for log in sorted((folder / "run" / "logs").glob("*.log")):
                error.add_note(f"{log.name}:\n  " + "\n  ".join(tail(log, 12)))
            raise


def asked(marker: int, prefill_at: str) -> list[m.Generate]:
    """The same requests for every marker: penalties, several answers to one prompt, grammars."""
    found: list[m.Generate] = []
    for n, request in enumerate(mixed(marker)):
        request = replace(request, prefill_at=prefill_at, sub_index=n % 3)
        if n % 5 == 1:
            request = replace(request, grammar=m.Grammar("regex", "[a-z ]{1,40}"))
        if n % 5 == 2:
            sampling = replace(request.sampling, presence_penalty=0.5, repetition_penalty=1.2)
            request = replace(request, sampling=sampling)
        if n % 7 == 3:
            request = replace(request, n_prompt_logprobs=1)
        found.append(request)
    return found


class Run(NamedTuple):
    """What came, and the figures of the decode side afterwards."""

    bits: Bits
    stats: m.ReplicaStats


def run(client: WireClient, requests: list[m.Generate]) -> Run:
    """All at once, to their ends; afterwards no block of the decode side is lost."""
    got = client.run(requests)
    client.settle(0.8)  # more than two heartbeats
    after = settled(client)
    return Run([outcome(got[request.rid]) for request in requests], after)


def settled(client: WireClient, timeout_s: float = 30) -> m.ReplicaStats:
    """The figures once nothing runs, no block is pinned or in quarantine, and no offer is kept."""

    def is_clean(stats: m.ReplicaStats) -> bool:
        spare = zip(stats.free_blocks, stats.cached_blocks, strict=True)
        is_idle = stats.ready and stats.running == stats.inflight_tokens == 0
        is_whole = [sum(blocks) for blocks in spare] == list(stats.total_blocks)
        return is_idle and is_whole and not stats.quarantined_blocks and not stats.handovers.held

    after = client.wait_stats(is_clean, timeout_s)
    assert after.failed_audits == 0
    return after


@contextmanager
def client_of(mesh: Mesh, group: int) -> Iterator[WireClient]:
    """A tokenizer of one group's scheduler, which is ready."""
    client = WireClient(mesh.config.scheduler_address(group))
    try:
        client.wait_stats(lambda s: s.ready, 60)
        yield client
    finally:
        client.close()


def settled_at(mesh: Mesh, group: int) -> m.ReplicaStats:
    """See `settled`."""
    with client_of(mesh, group) as client:
        client.settle(0.8)
        return settled(client)


def compare(mesh: Mesh) -> m.HandoverStats:
    """The same requests with prompts of the other group, and without; what was handed over."""
    settled_at(mesh, 0)
    with client_of(mesh, 1) as client:
        split = run(client, asked(1, PREFILLER))
        client.tell(m.FlushCache())
        alone = run(client, asked(2, ""))
    seen = split.stats.handovers
    assert seen.loaded >= 5
    assert seen.failed == 0
    assert seen.bytes >= 500_000
    assert alone.stats.handovers.asked == seen.asked
    assert settled_at(mesh, 0).handovers.served == seen.loaded
    assert split.bits == alone.bits
    return seen


@pytest.mark.timeout(240)
@pytest.mark.parametrize("shared", ["", "off"], ids=["a mapped file", "frames"])
def test_ids_and_logprobs_are_those_of_one_group(tmp_path: Path, shared: str) -> None:
    with start(tmp_path, shared=shared) as mesh:
        compare(mesh)
        files = mesh.config.shared_dir
        assert (files is None) == bool(shared)
        if files is not None:
            assert [path.name for path in files.iterdir()] == ["executor-0-0.handover"]
    assert files is None or not files.exists()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "drafts", "handover"),
    [(2, 0, "device"), (1, 3, "host")],
    ids=["two ranks, through windows", "drafts"],
)
def test_groups_of_several_ranks_and_with_drafts_hand_over_the_same(
    tmp_path: Path, ranks: int, drafts: int, handover: str
) -> None:
    with start(tmp_path, ranks=ranks, drafts=drafts, handover=handover) as mesh:
        compare(mesh)
        for rank in range(ranks if handover == "device" else 0):
            assert through_window(mesh, f"executor-1-{rank}")


def through_window(mesh: Mesh, executor: str) -> bool:
    """Whether it copies prompts out of the other side's device."""
    log = (Path(mesh.config.mesh.run_dir) / "logs" / f"{executor}.log").read_text()
    return "come through its window" in log


@pytest.mark.timeout(120)
def test_the_router_sends_a_long_prompt_to_both_and_the_trace_shows_how_it_came(
    tmp_path: Path,
) -> None:
    with start(tmp_path, handover="device") as mesh:
        for group in (0, 1):
            settled_at(mesh, group)
        until(lambda: through_window(mesh, "executor-1-0"), "the window")
        traceparent = new_traceparent()
        rng = random.Random(1)
        body = {
            "model": mesh.config.served_model,
            "prompt": [0, *(rng.randrange(20, VOCAB) for _ in range(699))],
            "max_tokens": 4,
            "ignore_eos": True,
        }
        url, headers = f"{mesh.url}/v1/completions", {"traceparent": traceparent}
        answer = httpx.post(url, json=body, headers=headers, timeout=100).json()
        assert answer["usage"]["completion_tokens"] == 4
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        spans = spans_of(mesh, traceparent)
        (hand_over,) = spans[SPAN_HAND_OVER]
        assert hand_over.attributes["from"] == PREFILLER
        assert hand_over.attributes["tokens"] == 640
        assert {span.process for span in spans[SPAN_QUEUE]} == {"scheduler-0", "scheduler-1"}
        assert [span.process for span in spans["kv store"]] == ["executor-0-0"]
        assert [span.process for span in spans["kv load"]] == ["executor-1-0"]


def spans_of(mesh: Mesh, traceparent: str) -> dict[str, list[Span]]:
    """The spans of a request by name, once the last process has written its part."""
    trace_id, wanted = trace_id_of(traceparent), {"request", SPAN_HAND_OVER, SPAN_DECODE}
    found: dict[str, list[Span]] = {}

    def is_whole() -> bool:
        found.clear()
        for span in read_spans(mesh.run_dir / "traces"):
            if span.trace_id == trace_id:
                found.setdefault(span.name, []).append(span)
        wanted_all = wanted | {"kv store", "kv load"}
        return wanted_all <= found.keys() and len(found.get(SPAN_QUEUE, [])) == 2

    deadline = time.monotonic() + 60
    while not is_whole():
        assert time.monotonic() < deadline, found.keys()
        mesh.wait_for(lambda: False, 0.1)
    return found
