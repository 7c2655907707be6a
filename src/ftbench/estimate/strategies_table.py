"""Compare all multi-GPU strategies for a spec: the memory of each GPU, and the tokens per second of all GPUs."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from ftbench.core import units
from ftbench.core.hardware import Gpu
from ftbench.core.table import folded, text_table
from ftbench.errors import SpecError
from ftbench.estimate.memory.estimate import SHARDED_SPREAD, MemoryEstimate, constants, estimate_memory
from ftbench.estimate.memory.largest_batch import with_batch
from ftbench.estimate.recommend.candidates import Candidate
from ftbench.estimate.time.duration import MEASURED, DurationEstimate, estimate_duration
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.workload.sharding import can_use, counts, on_gpus, shared_how
from ftbench.spec.experiment import Experiment, Launch
from ftbench.spec.methods import configuration
from ftbench.spec.strategies import STRATEGIES, division_problems

_MARKS = {"fits": "", "uncertain": " ?", "does not fit": " no"}


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy on one number of GPUs, with its estimates. `problems` lists why the strategy cannot run."""

    launch: Launch
    memory: MemoryEstimate | None
    time: DurationEstimate | None
    problems: tuple[str, ...]


def rows(spec: Experiment, gpu: Gpu | float, most: int, store: RunHistory, total: float | None) -> list[Row]:
    """Return one row for a single GPU, and one row for each strategy on 2, 4, ... and `most` GPUs.

    A row uses the spec's `offload` setting if the strategy supports this setting. With a pipeline, the batch of the
    spec is rounded up to a multiple of the micro-batches."""
    mesh, table = {"tp+fsdp": 2 * (spec.launch.tp or 1)}, list[Row]()
    pairs = [("none", 1), *((strategy, count) for strategy in STRATEGIES for count in counts(most)[1:]
                            if count >= mesh.get(strategy, 2) and can_use(spec, count, strategy))]  # fmt: skip
    single = Candidate(on_gpus(spec, 1, "none"))
    for strategy, count in pairs:
        known = STRATEGIES[strategy].offloads if count > 1 else ()
        offload = spec.launch.offload if spec.launch.offload in known else "none"
        variant, time = single.on(on_gpus(spec, count, strategy, offload).launch), None
        unit = variant.spec.launch.micro_batches or 1
        variant = Candidate(with_batch(variant.spec, unit * -(-spec.train.batch_size // unit)), variant.problems)
        if why := tuple(division_problems(spec.model, variant.spec.launch, configuration(spec.model))):
            table.append(Row(variant.spec.launch, None, None, why))
            continue
        if isinstance(gpu, Gpu):
            with suppress(SpecError):  # the time is not known, but the memory is
                time = estimate_duration(variant.spec, gpu, store)
        table.append(Row(variant.spec.launch, estimate_memory(variant.spec, gpu, total=total), time, variant.problems))
    return table


def as_text(spec: Experiment, name: str, table: Sequence[Row]) -> str:
    """Return a memory table and a speed table, with one row per strategy and one column per number of GPUs."""
    columns = sorted({row.launch.gpus for row in table})
    headings = ["strategy", *(f">{count} GPUs" if count > 1 else ">1 GPU" for count in columns)]
    memory, speeds = dict[str, dict[int, str]](), dict[str, dict[int, str]]()
    refused = dict[str, dict[str, None]]()
    for row in table:
        how = shared_how(row.launch)
        for why in row.problems:
            strategy = row.launch.strategy
            reason = why.removeprefix(f"{strategy}: ").removeprefix(f"launch.strategy: {strategy} ")
            refused.setdefault(reason, {})[strategy] = None
        if row.memory and not row.problems:
            text = units.gibibytes(row.memory.device.expected) + _MARKS[row.memory.verdict]
            memory.setdefault(how, {})[row.launch.gpus] = text
        if row.time and not row.problems:
            mark = "*" if row.time.basis == MEASURED else ""
            speeds.setdefault(how, {})[row.launch.gpus] = units.rate(row.time.tokens_per_s) + mark

    def cells(texts: dict[str, dict[int, str]]) -> list[list[str]]:
        return [[how, *(known.get(count, "") for count in columns)] for how, known in texts.items()]

    seen = ", ".join(constants().strategies)
    return "\n".join([
        f"{spec.model.id}, {spec.method.name}, batch {spec.train.batch_size} per GPU, on {name}", "",
        "GiB per GPU, expected (`?` may not fit, `no` does not)", text_table(headings, cells(memory)),
        folded(f"Runs confirm the memory of {seen}. Others may take {units.percent(SHARDED_SPREAD, 0)} more. With pp, "
               "the batch is rounded up to a multiple of the micro-batches."),
        *(["", "real tokens per second of all GPUs, estimated (`*` measured)", text_table(headings, cells(speeds))]
          if speeds else []),
        *(["", "not supported:"] if refused else []),
        *(folded(f"{', '.join(names)}: {why}") for why, names in refused.items()),
    ])  # fmt: skip


def as_document(spec: Experiment, name: str, table: Sequence[Row]) -> str:
    """Return the comparison as a JSON document: sizes in GiB, times in seconds."""
    records = [
        {
            **row.launch.model_dump(include={"strategy", "gpus", "offload"}), "problems": list(row.problems),
            "device": row.memory and asdict(row.memory.device), "verdict": row.memory and row.memory.verdict,
            "parts": row.memory and row.memory.parts, "step_s": row.time and asdict(row.time.step_s),
            "exposed_s": row.time and row.time.exposed_s, "tokens_per_s": row.time and row.time.tokens_per_s,
            "basis": row.time and row.time.basis,
            "memory_measured": row.launch.gpus == 1 or row.launch.strategy in constants().strategies,
        }
        for row in table
    ]  # fmt: skip
    return json.dumps({"schema": 1, "model": spec.model.id, "gpu": name, "strategies": records})
