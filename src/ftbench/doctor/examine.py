"""All findings of this machine, and whether a spec can run on it."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.core.architectures import architectures
from ftbench.core.units import GIB, gibibytes
from ftbench.doctor import abilities, environment, gpu, host, stack
from ftbench.doctor.facts import Facts, gather
from ftbench.doctor.findings import Finding, as_text
from ftbench.errors import FtbenchError
from ftbench.estimate import preflight
from ftbench.estimate.time.history import RunHistory
from ftbench.families import describe
from ftbench.launch import runner
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.frameworks import absolute, interpreter
from ftbench.spec.load import load
from ftbench.spec.methods import GPT_OSS
from ftbench.store import machine, rundir
from ftbench.store.rundir import first_gpu

SCHEMA = 1
AREA = "spec"
# What keeps every run from starting, whatever the spec.
ALWAYS = ((stack.AREA, "torch build"), (gpu.AREA, "driver"), (gpu.AREA, "kernels"), (host.AREA, "disk for runs"))


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings; `can_run` is None where no `subject` was named."""

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
        """Return findings by area, then what they come to, for a person."""
        count = {verdict: sum(finding.verdict == verdict for finding in self.findings) for verdict in ("warn", "fail")}
        ends = [f"{count['fail']} fail, {count['warn']} warn"]
        if self.can_run is not None:
            ends.append(f"{self.subject} {'can' if self.can_run else 'cannot'} run here")
        return f"{as_text(abilities.said_once(self.findings))}\n\n{'; '.join(ends)}"


def examine_environment(python: str) -> Diagnosis:
    """Look at the environment of another framework, by its interpreter."""
    described = machine.describe()
    findings = environment.check(absolute(python), bool(first_gpu(described)))
    can_run = not any(finding.verdict == "fail" for finding in findings)
    return Diagnosis(findings, can_run, described, "its framework")


def examine(spec_path: Path | None, sets: Sequence[str], out: Path) -> Diagnosis:
    """Look at this machine, and at whether the spec can run on it. Raise SpecError where the spec is wrong."""
    spec = load(spec_path, sets) if spec_path else None
    facts = gather()
    findings = [*stack.check(facts), *gpu.check(facts), *abilities.check(facts), *host.check(out, facts.environment)]
    if spec is None:
        return Diagnosis(findings, None, facts.described)
    if spec.launch.python:
        findings += environment.check(interpreter(spec.launch), facts.gpu != {})
    failures = [Finding(AREA, name, "fail", text) for name, text in obstacles(spec, facts, findings)]
    resolved = resolve(spec, facts.capability)
    if doubt := preflight.doubt(resolved, facts.described, out):
        failures.append(Finding(AREA, "memory and time", "fail", doubt))
    works = [Finding(AREA, spec.name, "ok", f"{spec.method.name} of {spec.model.id} can run on this machine")]
    if expected := preflight.expectation(resolved, first_gpu(facts.described) or None, RunHistory.read(out)):
        works.append(Finding(AREA, "memory and time", "ok", expected))
    return Diagnosis([*findings, *(failures or works)], not failures, facts.described)


def obstacles(spec: Experiment, facts: Facts, findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """Return what keeps a spec from running here, each as a name and a sentence: what a run would be refused for, what
    would stop every run, what the spec asks for and does not work, what it cannot load."""
    pairs = [(spec.name, sentence) for sentence in _refusals(spec, facts)]
    broken: dict[tuple[str, str], tuple[str, ...]] = dict.fromkeys(ALWAYS[-1:], ("fail",))
    if spec.launch.mock == "off":  # a mock trains nothing, and needs nothing but room for its files
        broken |= dict.fromkeys(abilities.used_by(spec), ("fail", "n/a")) | dict.fromkeys(ALWAYS, ("fail",))
        broken |= dict.fromkeys(environment.NEEDED, ("fail",))
        pairs += unreachable(spec, facts, findings)
    pairs += [(each.name, each.text) for each in findings if each.verdict in broken.get((each.area, each.name), ())]
    names: dict[str, str] = {}  # by sentence: the same reason is given once
    for name, sentence in pairs:
        names.setdefault(sentence, name)
    return [(name, sentence) for sentence, name in names.items()]


def _refusals(spec: Experiment, facts: Facts) -> list[str]:
    try:
        runner.check(resolve(spec, facts.capability), facts.described)
    except FtbenchError as error:
        return str(error).splitlines()
    return []


def unreachable(spec: Experiment, facts: Facts, findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """Yield weights and data that are neither here nor can be fetched, and weights that the disk has no room for."""
    hub = next(finding for finding in findings if (finding.area, finding.name) == (host.AREA, "hub"))
    cache = host.hub_cache(facts.environment)
    kept = cache / f"models--{spec.model.id.replace('/', '--')}"
    made = machine.cache_dir() / "models"
    if spec.model.weights == "pretrained" and not spec.model.path and not kept.exists():
        if hub.verdict != "ok":
            yield (
                "weights",
                f"{spec.model.id} is not in the cache and the hub cannot be asked: give model.path, set "
                "model.weights=random, or load it once where the hub is reached",
            )
        else:
            yield from _room(spec, cache, "set HF_HOME to a larger place")
    if spec.model.weights == "random" and not any(made.glob(f"*{spec.model.id.rsplit('/', 1)[-1]}-*")):
        yield from _room(spec, made, "set FTBENCH_CACHE to a larger place")
    source = spec.dataset.source.hub
    if source and hub.verdict != "ok" and not _data_kept(source, facts):
        yield (
            "data",
            f"{source} is not in the cache and the hub cannot be asked: take dataset=sample or a file of your own, or "
            "load it once where the hub is reached",
        )


def _data_kept(source: str, facts: Facts) -> bool:
    cache = host.hub_cache(facts.environment)
    prepared = Path(facts.environment.get("HF_DATASETS_CACHE") or cache.parent / "datasets")
    return (prepared / source.replace("/", "___")).exists()


def _room(spec: Experiment, folder: Path, way_out: str) -> Iterator[tuple[str, str]]:
    """Yield a sentence where weights whose shape is known do not fit: 4 bytes a parameter in float32, else 2; gpt-oss's
    experts in MXFP4 where they lie so in files. Random ones for quant_type mxfp4 are made in memory."""
    random = spec.model.weights == "random"
    if spec.model.path or spec.model.id not in architectures() or (random and spec.method.mxfp4):
        return
    shape = describe(architectures()[spec.model.id])
    packed = shape.family == GPT_OSS and (not random or spec.method.name == "unsloth")
    needed = shape.weight_bytes(4 if random and spec.model.dtype == "float32" else 2, packed) / GIB
    if needed > (free := host.free_gb(folder)):
        yield "weights", f"they take {gibibytes(needed)} GiB and {gibibytes(free)} GiB are free: {way_out}"
