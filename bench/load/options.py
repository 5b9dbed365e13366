"""The command line of `bench serve`."""

import argparse
import os
from pathlib import Path

from bench.load.pinned import MODEL
from bench.load.workload import PATHS


def arguments_of(description: str | None) -> argparse.Namespace:
    """What the command line asks for; ends the process where that makes no sense."""
    parser = argparse.ArgumentParser(prog="deepmesh bench serve", description=description)
    where = parser.add_argument_group("what is measured (one of)")
    where.add_argument("--url", default="", help="a server: http://HOST:PORT")
    where.add_argument("--fake-executor", action="store_true", help="a mesh without arithmetic")
    where.add_argument("--mesh", action="store_true", help="a mesh beside its executor alone")
    parser.add_argument("--model", default="", help="default: the first that the server lists")
    parser.add_argument("--api-key", default=os.environ.get("DEEPMESH_API_KEY", ""))
    parser.add_argument("--api", choices=sorted(PATHS), default="chat")
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=_positive, default=0, help="requests at a time")
    load.add_argument("--rate", type=float, default=0.0, help="requests a second, at random")
    load.add_argument("--requests", type=int, default=0, help="so many, instead of --seconds")
    load.add_argument("--seconds", type=float, default=0.0, help="measured, behind the warm-up")
    load.add_argument("--warmup-s", type=float, default=3.0)
    load.add_argument("--timeout-s", type=float, default=600.0, help="of one request")
    load.add_argument("--seed", type=int, default=0)
    asked = parser.add_argument_group("requests")
    asked.add_argument(
        "--prompts", type=Path, help="file: a prompt, or a JSON object, on each line"
    )
    asked.add_argument("--input-tokens", type=_positive, default=32, help="of made-up prompts")
    asked.add_argument(
        "--input-spread", type=float, default=0.0, help="0.5: from half to 1.5 times"
    )
    asked.add_argument("--output-tokens", type=_positive, default=0)
    asked.add_argument("--temperature", type=float, default=None)
    asked.add_argument(
        "--ignore-eos", action="store_true", help="an extension; go to the full length"
    )
    good = parser.add_argument_group("goodput: requests a second that keep all limits given")
    good.add_argument("--limit-ttft-ms", type=float, default=None)
    good.add_argument("--limit-tpot-ms", type=float, default=None)
    good.add_argument("--limit-e2e-ms", type=float, default=None)
    own = parser.add_argument_group("meshes of its own")
    own.add_argument("--tracing", action=argparse.BooleanOptionalAction, default=True)
    own.add_argument("--quick", action="store_true", help="--mesh: whether it works, no figures")
    own.add_argument("--waves", type=_positive, default=3, help="of --mesh")
    own.add_argument("--model-folder", type=Path, default=MODEL, help="of --mesh")
    own.add_argument("--prefill-share", type=float, default=0.1, help="of --mesh")
    parser.add_argument(
        "--pid", action="append", default=[], metavar="NAME=PID", help="CPU time of"
    )
    parser.add_argument("--no-store", action="store_true", help="not into bench/results")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    chosen = bool(arguments.url) + arguments.fake_executor + arguments.mesh
    if chosen != 1:
        parser.error("use one of --url, --fake-executor, --mesh")
    if arguments.rate and (arguments.concurrency or arguments.mesh):
        parser.error("--rate is open loop; --concurrency and --mesh are not")
    arguments.pids = dict(_named_pid(parser, text) for text in arguments.pid)
    arguments.pids["client"] = os.getpid()
    if arguments.fake_executor or arguments.mesh:
        arguments.ignore_eos = True
    _set_defaults(arguments)
    return arguments


def _set_defaults(arguments: argparse.Namespace) -> None:
    """Of a short run of each kind."""
    streams = 256 if arguments.fake_executor else 32 if arguments.mesh else 8
    arguments.concurrency = arguments.concurrency or streams
    output = 256 if arguments.fake_executor else 512 if arguments.mesh else 128
    arguments.output_tokens = arguments.output_tokens or output
    if not arguments.mesh and not arguments.requests:
        arguments.seconds = arguments.seconds or 10.0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _named_pid(parser: argparse.ArgumentParser, text: str) -> tuple[str, int]:
    name, _, pid = text.partition("=")
    if not name or not pid.isdigit():
        parser.error(f"--pid {text}: use NAME=PID")
    return name, int(pid)
