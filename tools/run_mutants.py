"""Mutation tests of the happens-before checker, all of them.

    tools/mutants                      every program of the corpus in each of its modes, and 2000 small ones
    tools/mutants --small 20000        more small programs, each with all its mutants against every order
    tools/mutants eight_experts        some programs only

Prints how many mutants there were of each kind, how many of the wrong ones were flagged, and how many of the right
ones; and from how many plans a wait was left out, which by the plan's own request must be missed. The exit status is 1
if a wrong mutant was not flagged, a right one was, a wait is needless, or a program could not be checked or is not
clean.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("test", "test/analysis", "test/inductor", "tools")]

import corpus  # noqa: E402
import mutants  # noqa: E402
import plan_contract  # noqa: E402

import form  # noqa: E402, F401
import worker_pool  # noqa: E402
from stream_programs import by_name  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs of test/stream_programs (all)")
    parser.add_argument("--small", type=int, default=2000, help="small random programs (2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first small program (0)")
    options = parser.parse_args()
    cases = [case for case in corpus.cases() if not options.names or case[0] in options.names]
    if options.names and not cases:
        parser.error(f"no program is called {' or '.join(options.names)}")
    warnings.filterwarnings("ignore")
    small, compiled, failed = mutants.Tally(), mutants.Tally(), []
    waits = 0
    progress = worker_pool.Progress(len(cases) + options.small, "programs")
    for seed in range(options.seed, options.seed + options.small):
        mutants.count_small(seed, small)
        progress.step()
    for name, mode in cases:
        try:
            with plan_contract.requests() as requests:
                report = corpus.check_program(by_name(name), None if mode == "default" else mode)
        except Exception as error:
            failed.append(f"{name}, {mode}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        else:
            failed += [f"{name}, {mode}: the program itself: {finding}" for finding in corpus.findings(report)]
            mutants.count_compiled(report, f"{name}, {mode}", compiled)
            count, wrong = plan_contract.mistakes(requests)
            waits += count
            failed += [f"{name}, {mode}: a plan: {what}" for what in wrong]
        progress.step()
    mistakes = [*small.mistakes, *compiled.mistakes]
    print(f"Small programs, against every order: {small.decided} mutants\n{small.table()}\n")
    print(f"Compiled programs, by construction: {compiled.decided} mutants\n{compiled.table()}\n")
    print(f"Plans, by what each was asked for: {waits} waits, each left out once\n")
    for title, lines in (("mistakes", mistakes), ("programs", failed)):
        print(f"{title}: {len(lines)}", *lines, sep="\n  ")
    return 1 if mistakes or failed else 0


if __name__ == "__main__":
    sys.exit(main())
