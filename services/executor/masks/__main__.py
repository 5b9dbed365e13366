"""`python -m services.executor.masks`: one mask worker, started by its executor and by nobody else.

It ends when the other end of its socket does.
"""

import argparse
import gc
import logging
import mmap
import signal
import socket
import sys
from pathlib import Path

import numpy as np

from deepmesh import log
from services.executor.masks.vocabulary import MaskVocabulary
from services.executor.masks.worker import Worker

_log = logging.getLogger(__name__)


def main() -> int:
    """Serve until the executor is gone; 2 if the vocabulary is of no use."""
    parser = argparse.ArgumentParser(prog="python -m services.executor.masks", description=__doc__)
    parser.add_argument("--name", required=True, help="for the log")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--socket", type=int, required=True, help="descriptor")
    parser.add_argument("--orders", type=int, required=True, help="descriptor of a second socket")
    parser.add_argument("--memory", type=int, required=True, help="descriptor")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--places", type=int, required=True, help="1 and the drafts of a row")
    parser.add_argument("--cache-size", type=int, required=True)
    parser.add_argument("--compile-s", type=float, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    log.setup(arguments.name, arguments.log_level)
    # Ctrl-C and a stop of the mesh are for the executor, which may still need its masks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end = socket.socket(fileno=arguments.socket)
    orders = socket.socket(fileno=arguments.orders)
    try:
        vocabulary = MaskVocabulary(arguments.model, arguments.vocab_size)
    except ValueError as error:
        _log.error("no grammars: %s", error)
        return 2
    rows = arguments.places * arguments.slots
    memory = mmap.mmap(arguments.memory, 4 * rows * vocabulary.num_words)
    masks = np.frombuffer(memory, np.int32).reshape(rows, vocabulary.num_words)
    worker = Worker(
        end,
        orders,
        masks,
        vocabulary,
        num_slots=arguments.slots,
        cache_size=arguments.cache_size,
        compile_s=arguments.compile_s,
        threads=arguments.threads,
    )
    gc.collect()
    gc.freeze()
    worker.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
