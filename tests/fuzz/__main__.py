"""Fuzz for a while: `python -m tests.fuzz --minutes 60 --seed 0`; repeat one: `--case SEED`."""

import argparse
import time
from collections import Counter

from tests.fuzz.judge import DEFECT, REFUSED, Verdict, judge
from tests.fuzz.recipes import Recipe, draw, simpler
from tests.processes import MOST_TRAVEL_ALONE, ProcessPool


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="the first case (default: 0)")
    parser.add_argument("--case", type=int, help="run this case only, and make it simpler")
    arguments = parser.parse_args()
    pool = ProcessPool(MOST_TRAVEL_ALONE)
    try:
        if arguments.case is not None:
            return _show(pool, draw(arguments.case))
        return _fuzz(pool, arguments.seed, 60.0 * arguments.minutes)
    finally:
        pool.close()


def _fuzz(pool: ProcessPool, seed: int, seconds: float) -> int:
    end, counts, reasons = time.monotonic() + seconds, Counter[str](), Counter[str]()
    while time.monotonic() < end:
        verdict = judge(pool, draw(seed))
        counts[verdict.kind] += 1
        if verdict.kind == REFUSED:
            reasons[verdict.told[:70]] += 1
        if verdict.kind == DEFECT:
            _print(verdict)
        seed += 1
    print(", ".join(f"{number} {kind}" for kind, number in counts.most_common()))
    for reason, number in reasons.most_common():
        print(f"  refused {number} times: {reason}")
    return 1 if counts[DEFECT] else 0


def _show(pool: ProcessPool, recipe: Recipe) -> int:
    verdict = judge(pool, recipe)
    _print(verdict)
    smaller = verdict.kind == DEFECT
    while smaller:
        smaller = False
        for candidate in simpler(verdict.recipe):
            found = judge(pool, candidate)
            if found.kind == DEFECT:
                verdict, smaller = found, True
                _print(verdict)
                break
    return 1 if verdict.kind == DEFECT else 0


def _print(verdict: Verdict) -> None:
    print(f"case {verdict.recipe.seed} {verdict.kind}: plan={verdict.recipe.plan!r}, ", end="")
    print(f"{verdict.recipe}\n    {verdict.told[-1500:]}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
