"""What a running, idle cluster costs: CPU of each process under `prelay serve`.

    python -m benchmarks.idle --pid PID [--seconds 30] [--json]

PID is the `prelay serve` process. Prints a line a process and the total, in percent of one core.
"""

import argparse
import json
import time

import psutil


def cpu_seconds(processes: list[psutil.Process]) -> dict[int, float]:
    """User and system time of each process that is still there."""
    times: dict[int, float] = {}
    for process in processes:
        try:
            spent = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        times[process.pid] = spent.user + spent.system
    return times


def measure(pid: int, seconds: float) -> list[tuple[str, float]]:
    """(name, percent of one core) of the process and all under it, over `seconds`."""
    root = psutil.Process(pid)
    family = [root, *root.children(recursive=True)]
    names = {process.pid: process.name() for process in family}
    before = cpu_seconds(family)
    time.sleep(seconds)
    after = cpu_seconds(family)
    return [(names[pid], (after[pid] - before[pid]) / seconds * 100) for pid in after]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pid", type=int, required=True, help="the `prelay serve` process")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure(options.pid, options.seconds)
    total = sum(percent for _, percent in rows)
    if options.json:
        print(json.dumps({"rows": [{"process": n, "percent": p} for n, p in rows], "total_percent": total}))
        return
    for name, percent in rows:
        print(f"{name:24s} {percent:6.2f} %")
    print(f"{'total':24s} {total:6.2f} %")


if __name__ == "__main__":
    main()
