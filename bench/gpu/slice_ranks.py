"""One slice on one GPU and on a group of GPUs: the same tokens at once, in one run.

`deepmesh bench decode|prefill --device cuda --ranks R`. A process and a GPU a rank; experts are
spread over the ranks, all else is on each, and tokens are dealt out evenly. The floor of a rank is
what it reads itself: its experts that any rank's tokens chose, the rest of the weights, its rows'
KV. Routers are those of the slice on one GPU.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Callable

import torch

from bench.accounting import Touched, kv_bytes, prefill_flops, weight_bytes
from bench.gpu.model_slice import ModelSlice
from bench.gpu.ranks import Rank, on_ranks
from bench.gpu.routes_seen import experts_of, routes_seen
from bench.gpu.timing import bf16_rate, event_us, read_rate
from bench.tables import show
from deepmesh.report import Json, report
from kernels.comm.one_sided import Geometry, OneSidedExchange
from services.executor.gpu.group import geometry_of
from services.executor.gpu.random_model import random_config
from services.executor.models.numerics import Numerics
from services.executor.presets import preset_config

REPEATS, WARM_UPS = 20, 3
PROMPT_REPEATS, PROMPT_WARM_UPS = 5, 2
POPULAR_TOKENS = 1024


class Asked:
    """Arguments of the command line, as they came to this process."""

    def __init__(self, asked: dict[str, Json]) -> None:
        self._asked = asked

    def text(self, name: str) -> str:
        """A string."""
        return str(self._asked[name])

    def numbers(self, name: str) -> list[int]:
        """Integers, ascending."""
        held = self._asked[name]
        assert isinstance(held, list)
        return sorted(int(str(each)) for each in held)

    def number(self, name: str) -> float:
        """One of them."""
        return float(str(self._asked[name]))


def decode(rank: Rank, asked: dict[str, Json]) -> None:
    """`asked`: preset, layers, batch (of all ranks), context, zipf. Each rank says its cases."""
    given = Asked(asked)
    batches = [batch for batch in given.numbers("batch") if batch % rank.ranks == 0]
    context, zipf = int(given.number("context")), given.number("zipf")
    read = read_rate() if rank.device.type == "cuda" else 0.0
    alone = _slice(rank, given, rows=max(batches), context=context)
    alone.make_popular(zipf)
    for batch in batches:
        _decode_case(rank, alone, batch, read, ranks=1)
    held = [bias.clone() for bias in alone.biases]
    del alone
    _free()
    exchange = _exchange(rank, given, tokens=max(batches) // rank.ranks)
    part = _slice(rank, given, rows=max(batches) // rank.ranks, context=context, exchange=exchange)
    for bias, same in zip(part.biases, held, strict=True):
        bias.copy_(same)
    for batch in batches:
        _decode_case(rank, part, batch // rank.ranks, read, ranks=rank.ranks)
        exchange.check()


def prefill(rank: Rank, asked: dict[str, Json]) -> None:
    """`asked`: preset, layers, tokens (of all ranks), zipf. Each rank says its cases."""
    given = Asked(asked)
    sizes, zipf = given.numbers("tokens"), given.number("zipf")
    flops = bf16_rate() if rank.device.type == "cuda" else 0.0
    alone = _slice(rank, given, tokens=max(sizes))
    alone.make_popular_in_prompts(zipf, min(POPULAR_TOKENS, max(sizes)))
    for tokens in sizes:
        _prefill_case(rank, alone, tokens, flops, ranks=1)
    held = [bias.clone() for bias in alone.biases]
    del alone
    _free()
    exchange = _exchange(rank, given, tokens=max(sizes) // rank.ranks)
    part = _slice(rank, given, tokens=max(sizes) // rank.ranks, exchange=exchange)
    for bias, same in zip(part.biases, held, strict=True):
        bias.copy_(same)
    for tokens in sizes:
        _prefill_case(rank, part, tokens // rank.ranks, flops, ranks=rank.ranks)
        exchange.check()


def _slice(
    rank: Rank,
    given: Asked,
    *,
    rows: int = 1,
    context: int = 64,
    tokens: int = 0,
    exchange: OneSidedExchange | None = None,
) -> ModelSlice:
    return ModelSlice(
        given.text("preset"),
        int(given.number("layers")),
        rows=rows,
        context=context,
        tokens=tokens,
        device=str(rank.device),
        exchange=exchange,
    )


def _exchange(rank: Rank, given: Asked, *, tokens: int) -> OneSidedExchange:
    raw = preset_config(given.text("preset"), layers=int(given.number("layers")))
    geometry: Geometry = geometry_of(
        random_config(raw), Numerics.named("bf16"), rank.ranks, max_rows=1, max_tokens=tokens
    )
    _, addresses = rank.window(geometry.window_bytes)
    rank.meet()
    return OneSidedExchange(
        geometry, rank.rank, addresses, device=str(rank.device), patience_s=30.0
    )


def _decode_case(rank: Rank, part: ModelSlice, rows: int, read: float, *, ranks: int) -> None:
    on_gpu = rank.device.type == "cuda"
    rank.meet()
    program = part.program(rows, graph=on_gpu)
    rank.meet()
    step = part.touched(program)
    rank.meet()
    samples = _times(rank, program.replay if on_gpu else program.run, REPEATS, WARM_UPS)
    median = statistics.median(samples)
    here = _held(rank, part, step, ranks)
    num = weight_bytes(part.config, here) + kv_bytes(part.config, here)
    floor = 1e6 * num / read if read else 0.0
    rank.say(
        {
            "ranks": ranks,
            "rank": rank.rank,
            "batch": rows * ranks,
            "context": part.context,
            "layers": part.config.num_hidden_layers,
            "step_ms": round(median / 1e3, 4),
            "best_ms": round(min(samples) / 1e3, 4),
            "ours_tokens_per_s": round(1e6 * rows * ranks / median, 1),
            "floor_ms": round(floor / 1e3, 4),
            "share_of_floor": round(floor / median, 4),
            "bytes_read": num,
            "experts_touched": round(sum(map(len, here.experts)) / len(here.experts), 1),
            "finite": bool(torch.isfinite(program.logits).all()),
        }
    )


def _held(rank: Rank, part: ModelSlice, step: Touched, ranks: int) -> Touched:
    """What this rank reads: its experts, of all ranks' tokens; its own rows."""
    if ranks == 1 or part.model.group is None:
        return step
    by_rank = [rank.swap(_wide(layer)) for layer in step.experts]
    experts: list[frozenset[int]] = []
    for spread, everywhere in zip(part.model.group.spreads, by_rank, strict=True):
        own = set(spread.host.places[rank.rank].tolist())
        chosen = {expert for text in everywhere for expert in _ids(text)}
        experts.append(frozenset(own & chosen))
    return Touched(tuple(experts), step.ids, step.positions)


def _prefill_case(rank: Rank, part: ModelSlice, tokens: int, flops: float, *, ranks: int) -> None:
    batch = part.prompt(tokens)
    rank.meet()
    with routes_seen() as seen:
        logits = part.prefill(batch)
    rank.meet()
    samples = _times(rank, lambda: part.prefill(batch), PROMPT_REPEATS, PROMPT_WARM_UPS, ahead=True)
    median = statistics.median(samples)
    work = prefill_flops(part.config, tokens)  # of this rank's tokens: of as many rows in the end
    rank.say(
        {
            "ranks": ranks,
            "rank": rank.rank,
            "tokens": tokens * ranks,
            "layers": part.config.num_hidden_layers,
            "prefill_ms": round(median / 1e3, 3),
            "best_ms": round(min(samples) / 1e3, 3),
            "ours_tokens_per_s": round(1e6 * tokens * ranks / median, 1),
            "tflops": round(work / median / 1e6, 1),
            "share_of_peak": round(work / (median * 1e-6) / flops, 4) if flops else None,
            "experts_chosen": round(
                sum(len(experts_of(ids)) for ids in seen) / max(1, len(seen)), 1
            ),
            "finite": bool(torch.isfinite(logits).all()),
        }
    )


def _times(
    rank: Rank, work: Callable[[], object], repeats: int, warm_ups: int, *, ahead: bool = False
) -> list[float]:
    """us of each; ranks begin together and keep step by their exchanges."""
    if rank.device.type != "cuda":
        work()
        return [1.0]
    rank.meet()
    found = [event_us(work, ahead=ahead) for _ in range(repeats + warm_ups)][warm_ups:]
    rank.meet()
    return found


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _wide(experts: frozenset[int]) -> bytes:
    return b"".join(expert.to_bytes(2, "little") for expert in sorted(experts))


def _ids(text: bytes) -> list[int]:
    return [int.from_bytes(text[at : at + 2], "little") for at in range(0, len(text), 2)]


def run(command: str, size: str, arguments: argparse.Namespace) -> dict[str, Json]:
    """The whole benchmark; arguments of `bench COMMAND`, `size` the one with numbers of tokens."""
    on_gpu = arguments.device == "cuda"
    asked: dict[str, Json] = {
        "preset": arguments.preset,
        "layers": arguments.layers,
        "zipf": arguments.zipf[0],
        "context": max(arguments.context) if size == "batch" else 0,
        size: getattr(arguments, size),
    }
    group = on_ranks(
        decode if size == "batch" else prefill,
        asked,
        ranks=arguments.ranks,
        device="cuda" if on_gpu else "host",
        limit_s=arguments.limit,
    )
    print(group.problem, file=sys.stderr, end="")
    both = ratios(group.found, size)
    show(f"{command} on a group", tuple(both[0]) if both else (size,), both)
    config: dict[str, Json] = {**asked, "ranks": arguments.ranks, "problem": group.problem}
    config["ratios"] = list(both)
    cases = [case for own in group.found for case in own]
    ok = not group.problem and all(bool(case["finite"]) for case in cases)
    name = torch.cuda.get_device_name() if on_gpu else None
    return report(f"bench {command}", config=config, cases=cases, ok=ok, gpu=name)


def ratios(found: list[list[dict[str, Json]]], size: str) -> list[dict[str, Json]]:
    """Tokens/s of the group over those of one GPU, by size; times are those of the slowest rank.

    Args:
        found: cases by rank.
        size: key of the number of tokens: "batch" or "tokens".
    """
    rates: dict[tuple[str, int], list[float]] = {}
    shares: dict[tuple[str, int], list[float]] = {}
    share = "share_of_floor" if size == "batch" else "share_of_peak"
    for case in [case for own in found for case in own]:
        key = str(case[size]), int(str(case["ranks"]))
        rates.setdefault(key, []).append(float(str(case["ours_tokens_per_s"])))
        shares.setdefault(key, []).append(float(str(case[share] or 0)))
    most = max((ranks for _, ranks in rates), default=1)
    return [
        {
            size: int(number),
            "ranks": most,
            "one_tokens_per_s": min(rates[number, 1]),
            "group_tokens_per_s": min(rates[number, most]),
            "ratio": round(min(rates[number, most]) / min(rates[number, 1]), 3),
            f"one_{share}": min(shares[number, 1]),
            f"group_{share}": min(shares[number, most]),
        }
        for number in sorted({number for number, _ in rates}, key=int)
        if (number, most) in rates and (number, 1) in rates
    ]
