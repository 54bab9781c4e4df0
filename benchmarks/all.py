"""`make bench`: every benchmark, one after the other, whatever the one before it said.

Each prints its bounds beside its figures. The last lines say which benchmarks missed one; the exit status is 1 then.
"""

import subprocess
import sys

BENCHMARKS = (
    ("first_epoch", "--rounds", "3"),
    ("fastpath", "--plot", "build/bench.svg"),
    ("prefetch",),
    ("warm_up",),
    ("snapshot",),
    ("observing",),
    ("fairness",),
    ("graph_training",),
    ("tracing",),
)


def main() -> None:
    missed = []
    for name, *arguments in BENCHMARKS:
        print(f"--- benchmarks.{name} {' '.join(arguments)}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments], check=False).returncode:
            missed.append(name)
    if missed:
        raise SystemExit(f"a bound was missed, or the benchmark failed: {', '.join(missed)}")
    print("every bound holds")


if __name__ == "__main__":
    main()
