"""Draws calls until one fails or the time is over."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback

import torch

from tests import fuzz
from tests.fuzz import others
from tests.fuzz.draw import Draw
from tests.fuzz.judge import attempt


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=fuzz.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="cpp", choices=("reference", "cpp", "triton"))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--call", type=int, help="this one alone")
    given = parser.parse_args(arguments)
    largest = 200 if given.backend == "triton" and not torch.cuda.is_available() else 5000
    end, refused = time.monotonic() + given.seconds, 0
    calls = itertools.count() if given.call is None else iter([given.call])
    number = 0
    for number in calls:
        seed = 10**7 * given.seed + number
        # every fourth has ids or a teacher instead of labels
        drawn = others.draw(seed, largest) if number % 4 == 3 else Draw(seed, largest).call()
        try:
            if isinstance(drawn, others.Drawn):
                drawn.attempt(given.backend)
            else:
                refused += not attempt(drawn, given.backend)
        except Exception:
            traceback.print_exc()
            print(drawn)
            print(
                f"python -m tests.fuzz --backend {given.backend} --seed {given.seed} --call {number}",
                flush=True,
            )
            return 1
        if time.monotonic() > end:
            break
    print(f"{number + 1} calls of {given.backend}, {refused} of them refused for their schedule, none wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
