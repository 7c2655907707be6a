"""All findings about this machine, and whether a spec can run on it."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.core.units import GIB, gibibytes
from ftbench.doctor import abilities, gpu, host, stack
from ftbench.doctor.facts import Facts, Finding, as_text, gather
from ftbench.errors import FtbenchError
from ftbench.facts import architectures
from ftbench.families import describe
from ftbench.launch import checks
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.frameworks import absolute, interpreter
from ftbench.spec.load import load
from ftbench.spec.methods import GPT_OSS
from ftbench.store import machine, rundir
from ftbench.store.rundir import first_gpu

SCHEMA = 1
AREA = "spec"
DISK, TORCH = (host.AREA, "disk for runs"), (stack.AREA, "torch build")  # failures that prevent every run


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings. `can_run` is None if there is no `subject` (a spec or a framework)."""

    findings: list[Finding]
    can_run: bool | None
    described: dict[str, Any]
    subject: str = "the spec"

    def as_dict(self) -> dict[str, Any]:
        """Return one JSON document."""
        return {
            "schema": SCHEMA,
            "date": rundir.now(),
            "can_run": self.can_run,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "machine": self.described,
        }

    def as_text(self) -> str:
        """Return the findings by area, then a summary."""
        count = {verdict: sum(finding.verdict == verdict for finding in self.findings) for verdict in ("warn", "fail")}
        ends = [f"{count['fail']} fail, {count['warn']} warn"]
        if self.can_run is not None:
            ends.append(f"{self.subject} {'can' if self.can_run else 'cannot'} run here")
        return f"{as_text(abilities.merged(self.findings))}\n\n{'; '.join(ends)}"


def examine_environment(python: str) -> Diagnosis:
    """Check the environment of another framework, given its Python interpreter."""
    described = machine.describe()
    findings = stack.check_environment(absolute(python), bool(first_gpu(described)))
    can_run = not any(finding.verdict == "fail" for finding in findings)
    return Diagnosis(findings, can_run, described, "its framework")


def examine(spec_path: Path | None, sets: Sequence[str], out: Path) -> Diagnosis:
    """Check this machine, and whether the spec can run on it. Raise SpecError for an invalid spec."""
    spec = load(spec_path, sets) if spec_path else None
    facts = gather()
    findings = [*stack.check(facts), *gpu.check(facts), *abilities.check(facts), *host.check(out, facts.environment)]
    if spec is None:
        return Diagnosis(findings, None, facts.described)
    if spec.launch.python:
        findings += stack.check_environment(interpreter(spec.launch), facts.gpu != {})
    failures = [Finding(AREA, name, "fail", text) for name, text in obstacles(spec, facts, findings)]
    resolved = resolve(spec, facts.capability)
    predicted, problem = _prediction(resolved, facts.described, out)
    if problem:
        failures.append(Finding(AREA, "memory and time", "fail", problem))
    works = [Finding(AREA, spec.name, "ok", f"{spec.method.name} of {spec.model.id} can run on this machine")]
    if predicted:
        works.append(Finding(AREA, "memory and time", "ok", predicted))
    return Diagnosis([*findings, *(failures or works)], not failures, facts.described)


def _prediction(spec: Experiment, described: dict[str, Any], out: Path) -> tuple[str | None, str | None]:
    """Return the prediction for a run here, and the reason why it would fail."""
    try:
        from ftbench.estimate import api
    except ImportError:
        return None, None
    return api.expectation(spec, first_gpu(described) or None, out), api.problem(spec, described, out)


def obstacles(spec: Experiment, facts: Facts, findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """Return (name, sentence) for everything that prevents a run: what `run` refuses, failed checks of features that
    the spec uses, and weights or data that cannot be loaded."""
    pairs = [(spec.name, sentence) for sentence in _refused(spec, facts)]
    needed: dict[tuple[str, str], tuple[str, ...]] = {DISK: ("fail",)}
    if spec.launch.mock == "off":
        needed |= dict.fromkeys(abilities.used_by(spec), ("fail", "n/a"))
        needed |= dict.fromkeys((TORCH, *stack.NEEDED), ("fail",))
        pairs += unreachable(spec, facts, findings)
    pairs += [(each.name, each.text) for each in findings if each.verdict in needed.get((each.area, each.name), ())]
    names: dict[str, str] = {}
    for name, sentence in pairs:
        names.setdefault(sentence, name)
    return [(name, sentence) for sentence, name in names.items()]


def _refused(spec: Experiment, facts: Facts) -> list[str]:
    try:
        checks.check(resolve(spec, facts.capability), facts.described)
    except FtbenchError as error:
        return str(error).splitlines()
    return []


def unreachable(spec: Experiment, facts: Facts, findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """Yield weights and data that are not in the cache and cannot be downloaded, and weights larger than the disk."""
    online = next(each for each in findings if (each.area, each.name) == (host.AREA, "hub")).verdict == "ok"
    cache = host.hub_cache(facts.environment)
    kept = cache / f"models--{spec.model.id.replace('/', '--')}"
    random_cache = machine.cache_dir() / "models"
    if spec.model.weights == "pretrained" and not spec.model.path and not kept.exists():
        if online:
            yield from _room(spec, cache, "set HF_HOME to a larger disk")
        else:
            yield (
                "weights",
                (
                    f"{spec.model.id} is not in the cache and the Hub cannot be reached: set model.path or "
                    "model.weights=random, or download it while online"
                ),
            )
    if spec.model.weights == "random" and not any(random_cache.glob(f"*{spec.model.id.rsplit('/', 1)[-1]}-*")):
        yield from _room(spec, random_cache, "set FTBENCH_CACHE to a larger disk")
    if (source := spec.dataset.source.hub) and not online:
        prepared = Path(facts.environment.get("HF_DATASETS_CACHE") or cache.parent / "datasets")
        if not (prepared / source.replace("/", "___")).exists():
            yield (
                "data",
                (
                    f"{source} is not in the cache and the Hub cannot be reached: use dataset=sample or a file, or "
                    "download it while online"
                ),
            )


def _room(spec: Experiment, folder: Path, fix: str) -> Iterator[tuple[str, str]]:
    """Yield a sentence if the weights of a known model do not fit on the disk.

    A parameter takes 4 bytes in float32, otherwise 2. The experts of gpt-oss are in MXFP4. Random weights for
    quant_type mxfp4 are created in memory.
    """
    random = spec.model.weights == "random"
    if spec.model.path or spec.model.id not in architectures() or (random and spec.method.mxfp4):
        return
    shape = describe(architectures()[spec.model.id])
    packed = shape.family == GPT_OSS and (not random or spec.method.name == "unsloth")
    needed = shape.weight_bytes(4 if random and spec.model.dtype == "float32" else 2, packed) / GIB
    if needed > (free := host.free_gb(folder)):
        yield "weights", f"they need {gibibytes(needed)} GiB, but only {gibibytes(free)} GiB are free: {fix}"
