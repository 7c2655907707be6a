"""Twenty answers about a store of runs, computed from its files alone: `python mixed_answers.py STORE`.

It shares no code with ftbench and uses only the standard library.
"""

import csv
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path

SITTING, BETWEEN_RUNS = 0.02, 0.0015  # standard deviations of the logarithm of a speed
CONTENDED_HOST, FEWEST_STEPS = 0.5, 5
SHORT = "with fewer than 5 steady steps"  # estimates use these runs if their steps agree


def numbers(rows, name):
    return [float(row[name]) for row in rows if row[name]]


def read(folder):
    """Return the facts of a run."""
    spec, machine, applied, state = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("spec", "machine", "applied", "state")
    )
    rows = list(csv.DictReader((folder / "steps.csv").read_text().splitlines()))
    steady = rows[spec["measure"]["warmup"] :]
    seconds = sum(numbers(steady, "step_time_s"))
    recorded = [value for name in ("loss", "step_time_s", "real_tokens") for value in numbers(rows, name)]
    busy = [(float(row["host_cpu_by_others"]), float(row["step_time_s"])) for row in steady]
    gpu = machine["gpus"][0]
    on = [name for name, value in spec["optimizations"].items() if value is True]
    name = spec["method"]["name"]
    return {
        "id": folder.name, "state": state["state"], "steady": len(steady), "finite": all(map(math.isfinite, recorded)),
        "recipe": f"{name} with {on[0]}" if on else {"lora": "plain"}.get(name, f"plain {name}"),
        "contended": bool(busy) and sum(share * time for share, time in busy) / seconds > CONTENDED_HOST,
        "rate": sum(numbers(steady, "real_tokens")) / seconds if steady else None,
        "length": applied["dataset"]["tokens"]["mean"], "peak": max(numbers(rows, "peak_memory_gb")),
        "data": (spec["dataset"]["max_length"], applied["dataset"]["hash"]),
        "gpu": gpu["name"], "card": gpu["uuid"], "commit": machine["ftbench"]["commit"],
        "spec": json.dumps(spec, sort_keys=True),
    }  # fmt: skip


def reason(run):
    """Return why the speed of a run is not used, or None."""
    if run["state"] != "ok":
        return {"oom": "out of memory", "running": "unfinished", "error": "failed"}[run["state"]]
    if not run["finite"]:
        return "not finite"
    if run["contended"]:
        return "contended"
    return SHORT if run["steady"] < FEWEST_STEPS else None


def t_quantile(p, freedom):
    """Return a quantile of Student's t by Simpson's rule and bisection."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def below(t, parts=2000):
        width = t / parts
        inner = sum(
            (4 if i % 2 else 2) * (1 + (i * width) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(1, parts)
        )
        return 0.5 + scale * width / 3 * (1 + inner + (1 + t**2 / freedom) ** (-(freedom + 1) / 2))

    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < p else (low, middle)
    return low


def interval(rates):
    """Return the 95 % interval of a mean speed with the spread between sittings."""
    logs, count = [math.log(rate) for rate in rates], len(rates)
    own = statistics.variance(logs)
    variance = max(own, (BETWEEN_RUNS**2 + (count - 1) * own) / count)
    between = statistics.NormalDist().inv_cdf(0.975) * SITTING
    half = math.hypot(t_quantile(0.975, count) * math.sqrt(variance / count), between)
    return [math.exp(statistics.fmean(logs) + sign * half) for sign in (-1, 1)]


def answers(store):
    runs = [read(path.parent) for path in sorted(store.rglob("state.json"))]
    left_out = Counter(why for run in runs if (why := reason(run)))
    groups = defaultdict(list)
    for run in runs:
        if not reason(run):
            groups[run["data"], run["gpu"], run["card"], run["commit"]].append(run)
    chosen = max(groups, key=lambda key: (len({run["recipe"] for run in groups[key]}), len(groups[key])))
    words = ("of other sample lengths", "on other machines", "on other cards", "of other commits")
    for key, group in groups.items():
        if key != chosen:
            differing = [word for word, a, b in zip(words, key, chosen, strict=True) if a != b]
            left_out["of other data" if key[0] != chosen[0] else differing[0]] += len(group)
    recipes = defaultdict(list)
    for run in groups[chosen]:
        recipes[run["recipe"]].append(run)
    speed = {name: statistics.geometric_mean(run["rate"] for run in group) for name, group in recipes.items()}
    first, second, *_ = sorted(speed, key=speed.get, reverse=True)
    peaks = {name: statistics.geometric_mean(run["peak"] for run in group) for name, group in recipes.items()}
    least = min(peaks, key=peaks.get)
    repeats = Counter((run["spec"], run["card"], run["commit"], run["data"]) for run in runs)
    invalid = [run for run in runs if run["state"] == "ok" and (not run["finite"] or run["contended"])]
    low, high = interval([run["rate"] for run in recipes[first]])
    return {
        "runs": len(runs),
        "left out": dict(left_out),
        "left out in all": sum(left_out.values()),
        "recipes": len(recipes),
        "winner": first,
        "tokens/s": speed[first],
        "low": low,
        "high": high,
        "runs of the winner": len(recipes[first]),
        "samples/h": speed[first] / groups[chosen][0]["length"] * 3600,
        "next": second,
        "times the next": speed[first] / speed[second],
        "times plain": speed[first] / speed["plain"],
        "least memory": least,
        "its peak": peaks[least],
        "its share of the speed": speed[least] / speed[first],
        "rank of plain": sorted(speed, key=speed.get, reverse=True).index("plain") + 1,
        "rows of repeats": len(repeats),
        "invalid on H200": sorted(run["id"] for run in invalid if run["gpu"] == "NVIDIA H200" and run["steady"] >= 5),
        "valid on H200": sum(run["gpu"] == "NVIDIA H200" and reason(run) in (None, SHORT) for run in runs),
    }


if __name__ == "__main__":
    print(json.dumps(answers(Path(sys.argv[1])), indent=1))
