"""`make bench`: run all benchmarks in turn, also after a failure.

Each prints its bounds beside its results. The last line lists the benchmarks that missed one; then the exit status
is 1.
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
    ("parquet",),
    ("writes",),
)


def main() -> None:
    missed = []
    for name, *arguments in BENCHMARKS:
        print(f"--- benchmarks.{name} {' '.join(arguments)}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments], check=False).returncode:
            missed.append(name)
    if missed:
        raise SystemExit(f"a bound was missed, or the benchmark failed: {', '.join(missed)}")
    print("all bounds hold")


if __name__ == "__main__":
    main()
