"""The heading that answers first: for each workload the fastest that fits, the smallest, and what failed."""

from __future__ import annotations

from collections.abc import Sequence

from ftbench.core import units
from ftbench.report.page.markup import Markup, element
from ftbench.report.page.view import Run, View

_MOST = 8  # workloads with cards of their own


def head(view: View) -> Markup:
    """The title, what all runs share, and the answers."""
    workloads = view.workloads
    context = " · ".join(f"{key} {value}" for key, value in view.context.items())
    warned = sum(bool(run.warnings) for run in view.runs)
    found = [
        element("p", context, class_="context") if context else None,
        *(_workload(view.of(name), name if len(workloads) > 1 else None) for name in workloads[:_MOST]),
    ]
    if len(workloads) > _MOST:
        found.append(element("p", f"{len(workloads) - _MOST} more workloads are in the table below.", class_="quiet"))
    if warned:
        about = "1 run carries a warning" if warned == 1 else f"{warned} of {len(view.runs)} runs carry warnings"
        found.append(
            element("p", element("span", "!", class_="mark", aria_hidden="true"), f"{about}. ",
                    element("a", "Read them", href="#notes"), class_="caution")
        )  # fmt: skip
    return element("header", element("h1", title(view)), *found, class_="head")


def title(view: View) -> str:
    """One sentence: the answer where there is one workload, what is compared where there are several."""
    workloads = view.workloads
    if len(workloads) == 1 and (best := fastest(view.runs)):
        model = workloads[0].split(",")[0]
        where = f" on {best.gpu}" if best.gpu else ""
        return f"{model}{where}: {_what(best)} is fastest, {units.rate(best.values['samples'])} samples per hour"
    gpus = dict.fromkeys(run.gpu for run in view.runs if run.gpu)
    return f"{len(view.runs)} fine-tuning runs on {', '.join(gpus) if len(gpus) <= 3 else f'{len(gpus)} GPUs'}"


def fastest(runs: Sequence[Run]) -> Run | None:
    """Most samples per hour of those that ended well."""
    return max((run for run in runs if "samples" in run.values), key=lambda run: run.values["samples"], default=None)


def smallest(runs: Sequence[Run]) -> Run | None:
    """Least memory at the peak of those that ended well; the faster of two alike."""
    fitting = [run for run in runs if "peak" in run.values]
    return min(fitting, key=lambda run: (run.values["peak"], -run.values.get("samples", 0.0)), default=None)


def _workload(runs: Sequence[Run], name: str | None) -> Markup:
    cards = [card for card in (_fastest_card(runs), _smallest_card(runs), _failed_card(runs)) if card]
    return element(
        "section", element("h2", name, class_="workload") if name else None,
        element("div", *cards, class_="cards"), class_="answers",
    )  # fmt: skip


def _fastest_card(runs: Sequence[Run]) -> Markup | None:
    best = fastest(runs)
    if best is None:
        return _card("Fastest that fits", "none", "No run ended well.", "")
    figures = f"{units.rate(best.values['samples'])} samples/h"
    if "tokens" in best.values:
        figures += f", {units.rate(best.values['tokens'])} real tokens/s"
    peak = f"{units.gibibytes(best.values['peak'])} GiB of tensors at the peak. " if "peak" in best.values else ""
    return _card("Fastest that fits", _where(best, runs), figures, peak + _certainty(best, runs))


def _certainty(best: Run, runs: Sequence[Run]) -> str:
    """What speaks against taking the fastest at its word."""
    if len(runs) == 1:
        return "The only run."
    if best.interval is None:
        return f"{best.steady} steady steps: too few for a 95 % interval."
    low = best.values["samples"] * best.values["step"] / best.interval[1]
    near = [run for run in runs if run is not best and _high(run) >= low]
    if not near:
        return "No other run's 95 % interval reaches it."
    names = "; ".join(dict.fromkeys(_where(run, runs) for run in near[:3]))
    more = f" and {len(near) - 3} more" if len(near) > 3 else ""
    return f"95 % intervals overlap: not told apart from {names}{more}."


def _high(run: Run) -> float:
    """The upper end of a run's samples per hour."""
    if "samples" not in run.values:
        return float("-inf")
    return run.values["samples"] * (run.values["step"] / run.interval[0] if run.interval else 1.0)


def _smallest_card(runs: Sequence[Run]) -> Markup | None:
    least, best = smallest(runs), fastest(runs)
    if least is None:
        return None
    speed = ""
    if best is not None and "samples" in least.values:
        share = least.values["samples"] / best.values["samples"] - 1
        rate = units.rate(least.values["samples"])
        speed = "It is also the fastest." if least is best else f"{rate} samples/h, {share:+.0%} against the fastest."
    figure = f"{units.gibibytes(least.values['peak'])} GiB of tensors at the peak"
    return _card("Least memory", _where(least, runs), figure, speed.replace("-", "−"))


def _failed_card(runs: Sequence[Run]) -> Markup:
    failed = [run for run in runs if run.state != "ok"]
    if not failed:
        return _card("Failed", "nothing", f"{len(runs)} of {len(runs)} runs ended well", "")
    states: dict[str, list[str]] = {}
    for run in failed:
        states.setdefault(run.state, []).append(_where(run, runs))
    listed = []
    for state, names in states.items():
        distinct = list(dict.fromkeys(names))
        more = f" and {len(distinct) - 6} more" if len(distinct) > 6 else ""
        listed.append(f"{_in_words(state)}: {'; '.join(distinct[:6])}{more}.")
    return _card("Failed", f"{len(failed)} of {len(runs)} runs", " ".join(listed), "", kind="bad")


def _in_words(state: str) -> str:
    return "Out of memory" if state == "oom" else state.capitalize()


def _what(run: Run) -> str:
    batch = f"{run.batch}x{run.accumulation}" if run.accumulation > 1 else f"{run.batch}"
    return f"{run.method} at batch\u00a0{batch}"


def _where(run: Run, runs: Sequence[Run]) -> str:
    """Method and batch, with GPU and optimizations where these differ among the runs."""
    batch = f"{run.batch}x{run.accumulation}" if run.accumulation > 1 else f"{run.batch}"
    text = f"{run.method}, batch {batch}"
    if run.optimizations != "none":
        text += f", {run.optimizations}"
    return text + (f", on {run.gpu}" if len({other.gpu for other in runs}) > 1 else "")


def _card(label: str, answer: str, figures: str, more: str, kind: str = "") -> Markup:
    return element(
        "div", element("h3", label), element("p", answer, class_="answer"), element("p", figures, class_="figures"),
        element("p", more, class_="quiet") if more else None, class_=f"card {kind}".strip(),
    )  # fmt: skip
