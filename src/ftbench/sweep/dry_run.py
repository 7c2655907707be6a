"""What `--dry-run` says: every job with where it stands, the command that makes it, and what it is expected to take."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftbench.core.units import JOULES_PER_KWH, gibibytes, seconds
from ftbench.spec.prices import Prices, amount, load_prices
from ftbench.sweep.command import Ready
from ftbench.sweep.jobs import Job, Standing, command
from ftbench.sweep.plan import frontier
from ftbench.sweep.plan.search import Search, trial_of

NO_ESTIMATOR = "no predictions: the package ftbench.estimate is not installed"


@dataclass(frozen=True, slots=True)
class Planned:
    """One line: `seconds` at most (of earlier runs) or `estimated_s`, how sure that is, the GiB needed, the command."""

    what: str
    state: str
    reason: str | None
    seconds: float | None = None
    peak_gb: float | None = None
    verdict: str | None = None
    estimated_s: float | None = None
    confidence: str | None = None
    joules: float | None = None
    command: list[str] = field(default_factory=list)


def dry_run(ready: Ready) -> list[Planned]:
    """Return every job with where it stands and the command that makes it; of a search the first trials."""
    plan = ready.plan
    if isinstance(plan, Search):
        while plan.next(lambda job: True) is not None:
            pass
    trials: dict[str, list[frontier.Trial]] = {}
    for job, standing in plan.standings.items():
        if standing.state == "ok":
            trials.setdefault(job.family, []).append(trial_of(job, standing))
    estimator = _estimator()
    predictor = estimator.Predictor(ready.device, ready.request.out) if estimator and ready.device else None
    lines = [_planned(ready, predictor, job, standing, trials.get(job.family, []))
             for job, standing in plan.standings.items()]  # fmt: skip
    return lines + [Planned(cell, "impossible", reason) for cell, reason in ready.impossible]


def _estimator() -> Any | None:
    try:
        from ftbench.estimate import api
    except ImportError:
        return None
    return api


def _planned(
    ready: Ready, predictor: Any, job: Job, standing: Standing, trials: Sequence[frontier.Trial]
) -> Planned:  # fmt: skip
    peak = frontier.peak_on_the_line(trials, job.spec.train.batch_size)
    expected = verdict = estimated = confidence = joules = None
    if not standing.done:
        expected = ready.plan.wall_times.at_most_s(job)
        if predictor is not None:
            predicted = predictor.predict(job.spec)
            verdict, peak = predicted.verdict, predicted.reserved_gb if peak is None else peak
            if expected is None:
                estimated, confidence = predicted.seconds, predicted.confidence
            if predicted.watts and (lasts := expected or estimated):
                joules = lasts * predicted.watts
    state = "pending" if standing.state == "running" else standing.state
    return Planned(
        job.what, state, standing.reason, expected, peak, verdict, estimated, confidence, joules,
        command(ready.request.spec, job, ready.request.out),
    )  # fmt: skip


def as_text(lines: Sequence[Planned], ready: Ready | None = None, prices: Path | None = None) -> str:
    """Return the lines of --dry-run for people, and what all runs that are to come take together."""
    text = []
    for line in lines:
        duration = f"at most {seconds(line.seconds)}" if line.seconds else ""
        if line.estimated_s:
            duration = f"about {seconds(line.estimated_s)} ({line.confidence})"
        memory = f"{gibibytes(line.peak_gb)} GiB" if line.peak_gb else ""
        verdict = line.verdict if line.verdict != "fits" else None
        details = ", ".join(part for part in (line.reason, duration, memory, verdict) if part)
        text.append(f"{line.state:<10} {line.what}" + (f": {details}" if details else ""))
        if line.command:
            text.append(f"           {shlex.join(line.command)}")
    return "\n".join([*text, *_totals([line for line in lines if line.state == "pending"], ready, prices)])


def _totals(pending: Sequence[Planned], ready: Ready | None, prices: Path | None) -> list[str]:
    """Return a line with runs, time, energy of the GPU, and money, and of how many of them these are known."""
    gpu = ready.device["name"] if ready and ready.device else ""
    known_prices = load_prices(prices, {gpu}) if prices else None
    lasting = [time for line in pending if (time := line.seconds or line.estimated_s)]
    drawn = [line.joules for line in pending if line.joules is not None]
    count = f"{len(pending)} run{'s' * (len(pending) != 1)}"
    if not lasting:
        why = "no run like them has been measured on this GPU" if ready and ready.device else "there is no GPU here"
        why = why if _estimator() else NO_ESTIMATOR
        return [f"\ntotal: {count}; how long they take is not known: {why}"]
    slots = len(ready.slots) if ready else 1
    total, joules = sum(lasting), sum(drawn)
    parts = [count, f"about {seconds(total / slots)}" + (f" on {slots} GPUs" if slots > 1 else "")]
    parts += [f"{joules / JOULES_PER_KWH:.3g} kWh of the GPU"] if drawn else []
    parts += _money(total, joules, gpu, known_prices) if drawn and known_prices else []
    parts += [f"known of {len(lasting)} of them"] if len(lasting) < len(pending) else []
    return ["\ntotal: " + ", ".join(parts)]


def _money(total: float, joules: float, gpu: str, prices: Prices) -> list[str]:
    price = prices.of(gpu)
    cost = amount(price, total, joules / total) if price else None
    return [f"{cost} ({cost.way})" if cost else f"{prices.path} has no price for {gpu}"]
