"""Workloads by seed: lengths around every edge, shared beginnings, stops, aborts, priorities."""

import random

from deepmesh.wire.messages import Capacity

from .clock import MS
from .requests import SimRequest


def mixed(
    seed: int,
    count: int,
    capacity: Capacity,
    *,
    span_ns: int = 50 * MS,
    abort_share: float = 0.2,
    grammar_share: float = 0.2,
    most_output: int = 80,
    is_crowd: bool = False,
) -> list[SimRequest]:
    """Requests that fit the device alone, arriving over `span_ns`; some ask for several outputs
    of one prompt, as so many requests. In a crowd prompts are short and outputs long: many enter,
    and all of them grow."""
    draw = random.Random(seed)
    size, align, vocab = capacity.block_size, capacity.chunk_align, capacity.vocab_size
    room = min(capacity.max_model_len, capacity.num_global_blocks * size)
    system = [draw.randrange(vocab) for _ in range(room)]
    edges = [1, size - 1, size, size + 1, align - 1, align, align + 1, 2 * align, 3 * align + 1]
    requests: list[SimRequest] = []
    while len(requests) < count:
        length = draw.choice(edges) if draw.random() < 0.3 else draw.randrange(1, 2 * room // 3)
        length = min(length, room - 1) if not is_crowd else draw.randrange(1, room // 5)
        shared = draw.choice([0, 0, align, 2 * align + 3, 4 * align])
        prompt = system[: min(shared, length)]
        prompt += [draw.randrange(vocab) for _ in range(length - len(prompt))]
        stops = draw.sample(range(vocab), 3) if draw.random() < 0.4 else []
        most = draw.randrange(1, min(most_output, room - length) + 1)
        most = min(room - length, room // 2) if is_crowd else most
        arrival = draw.randrange(span_ns)
        base, outputs = draw.randrange(1 << 30), draw.choice([1, 1, 1, 1, 1, 2, 3])
        for sub_index in range(min(outputs, count - len(requests))):
            requests.append(
                SimRequest(
                    rid=len(requests).to_bytes(16, "big"),
                    prompt=prompt,
                    max_tokens=most,
                    arrival_ns=arrival,
                    seed=base,
                    sub_index=sub_index,
                    min_tokens=min(most, draw.choice([0, 0, 4])),
                    stop_ids=frozenset(stops),
                    priority=draw.choice([0, 0, 0, 1]),
                    grammar=draw.random() < grammar_share,
                    grammar_len=draw.choice([0, 0, 3, 12, 30]),
                    abort_ns=draw.randrange(1, 80 * MS) if draw.random() < abort_share else 0,
                    stop_at=draw.choice([0, 0, 0, 5, 20]),
                )
            )
    return requests
