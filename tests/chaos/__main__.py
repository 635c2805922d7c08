"""`python -m tests.chaos [--seed N] [--seeds COUNT] [--seconds 180]`"""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from pathlib import Path

from tests import chaos
from tests.chaos.run import RATE, run, seeds_from
from worker_node.models.store import ModelStore


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=chaos.__doc__)
    parser.add_argument("--seed", type=int, help="the first seed; default: a new one")
    parser.add_argument("--seeds", type=int, default=1, metavar="COUNT", help="how many seeds, one after another")
    parser.add_argument("--seconds", type=float, default=180, help="for each seed")
    parser.add_argument("--rate", type=float, default=RATE, help="calls a second")
    parser.add_argument("--verbose", action="store_true", help="print each fault as it strikes")
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO if options.verbose else logging.CRITICAL)
    violated = False
    for seed in seeds_from(options.seed, options.seeds):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as root:
            report = asyncio.run(
                run(
                    seed,
                    options.seconds,
                    Path(root),
                    ModelStore(),
                    rate=options.rate,
                    log=print if options.verbose else None,
                )
            )
        print(report, f"\n  ({time.monotonic() - began:.0f} s with start and end)", flush=True)
        if report.violations:
            print(f"  repeat: python -m tests.chaos --seed {seed} --seconds {options.seconds:g} --verbose")
        violated |= bool(report.violations)
    return int(violated)


if __name__ == "__main__":
    sys.exit(main())
