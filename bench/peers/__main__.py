"""Environments of the peers that `bench decode` and `bench prefill` can measure beside ours.

`deepmesh bench peers setup mlx nemo` makes them; `deepmesh bench peers` says which are there.
"""

import argparse
import sys
from pathlib import Path

from bench.floor import cache_folder
from bench.peers.venvs import RECIPES, PeerError, python_of, recipe, set_up


def main() -> int:
    """Command line; 1 if a peer could not be set up."""
    parser = argparse.ArgumentParser(prog="deepmesh bench peers", description=__doc__)
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="where they are kept")
    orders = parser.add_subparsers(dest="order")
    setup = orders.add_parser("setup", help="make the environments")
    setup.add_argument("names", nargs="+", choices=sorted(RECIPES))
    arguments = parser.parse_args()
    try:
        if arguments.order == "setup":
            for name in arguments.names:
                python = set_up(name, arguments.cache, lambda text: print(text, file=sys.stderr))
                print(f"{name}: {python}")
        else:
            for name in RECIPES:
                print(f"{name}: {_state(name, arguments.cache)}; {recipe(name).remark}")
    except PeerError as error:
        print(f"deepmesh: {error}", file=sys.stderr)
        return 1
    return 0


def _state(name: str, cache: Path) -> str:
    try:
        return str(python_of(name, cache))
    except PeerError as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
