"""Runs every kind of trainer with every seed: `python -m tests.audit.prove [KIND ...] [--seeds 0,1,2]`."""

import argparse
import json
import sys
import tempfile
import time

from tests.audit.trainers import KINDS, audited
from tests.dist.harness import World


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", type=int)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("-v", action="store_true")
    options = parser.parse_args()
    worlds = {}
    for number, kind in enumerate(KINDS):
        if options.kinds and number not in options.kinds:
            continue
        for seed in map(int, options.seeds.split(",")):
            world = worlds.setdefault(kind.ranks, World(kind.ranks, quiet=True))
            with tempfile.TemporaryDirectory() as folder:
                t = time.perf_counter()
                try:
                    codes, text, more = world.run(audited, number, seed, folder, timeout=200)[0]
                except AssertionError as error:
                    print(number, kind.name, seed, "FAILED", str(error)[-1500:])
                    continue
            good = codes == ([kind.code] if kind.code else [])
            print(
                number,
                kind.name,
                seed,
                "ok" if good else "BAD",
                codes,
                "expected",
                kind.code,
                f"{time.perf_counter() - t:.1f}s audit {more['seconds']:.1f}s",
                flush=True,
            )
            if options.v or not good:
                print(text)
    for w in worlds.values():
        w.close()


if __name__ == "__main__":
    main()
