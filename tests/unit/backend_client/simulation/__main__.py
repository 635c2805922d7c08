"""python -m tests.unit.backend_client.simulation --seeds 0:10000 --jobs 4

Prints each violated invariant with its seed, and exits 1 if there is any.
"""

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.unit.backend_client.simulation.run import simulate


def seeds(text):
    """`7` or `0:10000`."""
    start, colon, stop = text.partition(":")
    return range(int(start), int(stop) if colon else int(start) + 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=seeds, default=seeds("0:1000"))
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    began = time.perf_counter()
    ends, failed = Counter(), 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for seed, outcome in zip(options.seeds, pool.map(simulate, options.seeds, chunksize=20), strict=True):
            ends += outcome.ends
            failed += bool(outcome.violations)
            for violation in outcome.violations:
                print(f"seed {seed}: {violation}", flush=True)
    seconds = time.perf_counter() - began
    rate = len(options.seeds) / seconds * 60
    print(f"{len(options.seeds)} scenarios in {seconds:.1f} s ({rate:.0f} a minute), {failed} failed")
    print("calls ended:", ", ".join(f"{end} {count}" for end, count in ends.most_common()))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
