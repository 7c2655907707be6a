"""Pydantic models of the JSON files of runs, sweeps, probes and bundles, one model per file.

Files may come from other people and other versions of ftbench. A reader checks the known keys and keeps unknown keys.
`scripts/reference` generates docs/reference/schemas from these models.
"""

from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from typing_extensions import TypeAliasType

MAX_RANKS = 1024  # most ranks of a run
_NUMBER_PROBLEMS = ("finite_number", "less_than", "greater_than")
_LARGEST = 1e60  # no run writes a larger number, and products of several such numbers do not overflow

Number = TypeAliasType("Number", Annotated[float, Field(gt=-_LARGEST, lt=_LARGEST)])
Json = TypeAliasType("Json", "dict[str, Json] | list[Json] | str | bool | Number | None")
Integer = TypeAliasType("Integer", Annotated[int, Field(gt=-(2**63), lt=2**63)])
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Text = str | None
Figure = Number | None
Count = Integer | None
Texts = dict[str, Text]
Figures = dict[str, Figure]
Counts = dict[str, Integer]


class FileModel(BaseModel):
    """An object with known and unknown keys. Unknown keys may have any JSON value with finite numbers."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, defer_build=True, protected_namespaces=()
    )
    __pydantic_extra__: dict[str, Json] = Field(init=False)


class _FiguresDocument(FileModel):
    __pydantic_extra__: dict[str, Figure] = Field(init=False)  # type: ignore[assignment]


class _NumbersDocument(FileModel):
    __pydantic_extra__: dict[str, Number] = Field(init=False)  # type: ignore[assignment]


class _CountsDocument(FileModel):
    __pydantic_extra__: dict[str, Count] = Field(init=False)  # type: ignore[assignment]


class Empty(BaseModel):
    """An object without keys: a section without figures."""

    model_config = ConfigDict(extra="forbid")


def _model(title: str, base: type[FileModel] = FileModel, /, **keys: Any) -> Any:
    """Create a pydantic model with these keys. A key is required if `_need` marks its type, otherwise optional."""
    fields: dict[str, Any] = {key: kind if isinstance(kind, tuple) else (kind, None) for key, kind in keys.items()}
    return create_model(title, __base__=base, **fields)


def _need(kind: Any) -> Any:
    """Mark a key of a pydantic model as required. `kind` is the type of the value."""
    return kind, ...


def _list(kind: Any) -> Any:
    return list[kind]


def _map(kind: Any) -> Any:
    return dict[str, kind]


# --- a machine and a run ---------------------------------------------------------------------------------------------

_Oom = _model("Oom", kind=Text, bytes_requested=Figure, phase=Text, step=Count)
_Lengths = _model("Lengths", _FiguresDocument, histogram=_model("Histogram", edges=list[Number], counts=list[Integer]))
_Dataset = _model(
    "Dataset", name=Text, hash=Text, order_hash=Text, samples=Figure, eval_samples=Figure, max_length=Figure,
    images=_model("Images", _FiguresDocument, tokens=_Lengths, patches=_Lengths),
    tokens=_Lengths, tokens_before_truncation=_Lengths,
)  # fmt: skip
_Gpu = _model(
    "Gpu", name=Text, uuid=Text, driver=Text, compute_capability=list[Integer] | None, mig=bool | None,
    process_ids=list[Integer] | None, memory_gb=Figure, memory_used_before_gb=Figure, foreign_processes=Figure,
    power_limit_w=Figure, power_limit_max_w=Figure, idle_power_w=Figure, temperature_c=Figure, sm_clock_mhz=Figure,
    sm_clock_max_mhz=Figure, memory_clock_max_mhz=Figure, ecc_uncorrected=Figure,
)  # fmt: skip
_Machine = _model(
    "machine.json", gpu=_Gpu | None, gpus=_list(_Gpu) | None, ftbench=Texts, os=Texts, versions=Texts,
    cpu=_model("Cpu", _FiguresDocument, model=Text), environment=Texts, shared_host=bool | None,
    ceilings=_model("Ceilings", _FiguresDocument, tflops=Figures) | None,
)  # fmt: skip
_State = _model(
    "state.json", state=str, reason=Text, started_at=Text, ended_at=Text, wall_s=Figure, child_exit=Figure,
    exit_code=Count, signal=Count, oom=_Oom | None,
    owner=_model("Owner", pid=Count, start=Count, boot=Text, host=Text),
)  # fmt: skip
_Phases = _model(
    "phases.json", phases=_list(_model("Phase", _FiguresDocument, name=_need(str), start_s=_need(Number)))
)  # fmt: skip
_LAYERS: dict[str, Any] = {"attention_width": list[Integer], "windows": list[Count]}
_Parameters = _model("ParametersOfKind", total=Count, trainable=Count)
_Applied = _model(
    "applied.json", warnings=list[str], loss=Text, product_precision=Text, gpu_busy_method=Text, trained_dtype=Text,
    loss_normalisation=Text, padding=Text, patched_by=Text, compile_cache=Text, dataset=_Dataset,
    gradient_checkpointing=bool | Figure, reported=_model("Reported", samples_per_s=Figure),
    reference=_model("Reference", kind=Text, in_step=bool) | None,
    generation=_model("Generation", by=Text, reward=Text, reward_sha256=Text),
    parallel=_model("Parallel", split=list[Count], stages=list[Integer], busy_s=Figure, pass_s=Figure),
    resolved=_map(_model("Resolved", reason=_need(Text), value=_need(Json))),
    matmul_shape=_model("MatmulShape", _CountsDocument, **_LAYERS) | None,
    vision_shape=_model("VisionShape", _NumbersDocument, **_LAYERS) | None,
    model=_model("Model", weights_gb_by_dtype=Figures, modules=Counts, **{"class": Text}),
    optimizer=_model("Optimizer", state=Counts, **{"class": Text}),
    parameters=_model("Parameters", total=Count, trainable=Count, by_kind=_map(_Parameters)),
)  # fmt: skip
_Spec = _model(
    "spec.json", name=str, model=_model("SpecModel", id=str, weights=Text), method=_model("SpecMethod", name=str),
    objective=_model("SpecObjective", name=str), dataset=_model("SpecDataset", name=Text),
    train=_model("SpecTrain", batch_size=Integer, gradient_accumulation_steps=Integer, precision=Text),
    measure=_model("SpecMeasure", warmup=Integer | str, share_gpu=bool, profile=str), optimizations=dict[str, Json],
    launch=_model("SpecLaunch", gpus=Ranks, tp=Ranks | None, strategy=str, offload=str, framework=str), imported=Texts,
)  # fmt: skip
_Range = _model("Range", _NumbersDocument, lowest=_need(Number), highest=_need(Number))
_Summary = _model(
    "summary.json", name=str, run_id=str, state=str, reason=Text, method=str, model=str, weights=str, gpu=Text,
    batch_size=Integer, gradient_accumulation_steps=Integer, optimizations=list[str], steps=Counts, first_step_s=Figure,
    time_to_steady_s=Figure, samples_per_s=Figure, samples_per_hour=Figure, model_tflops=Figure, mfu=Figure,
    hfu=Figure, mfu_measured=Figure, drift=Figure, energy=Figures, loss=Figures, phases_s=dict[str, Number],
    dataset=_Dataset, oom=_Oom | None, warnings=list[str], first_step_cache=Text, images_per_s=Figures,
    forward_s=Figures, parts_s=Figures,
    step_time_s=_model("StepTime", _FiguresDocument, median=_need(Figure), ci95=list[Number] | None) | Empty,
    tokens_per_s=_model("Tokens", _FiguresDocument, real=_need(Figure)) | Empty,
    memory_gb=_model("Memory", _FiguresDocument, peak_phase=_need(Text)) | Empty,
    parameters=_model("Total", _CountsDocument, total=_need(Count)) | Empty,
    bound=_model("Bound", _FiguresDocument, verdict=Text, also=_need(list[str]), why=_need(Text),
                 gpu_busy_method=Text) | Empty,
    outliers=_list(_model("Outlier", step=Count, step_time_s=Number, times_the_median=Number, **{"with": list[str]})),
    learning=_model("Learning", state=Text, first_step=Figure, count=Figure),
    contention=_model("Contention", _FiguresDocument, contended=bool),
    ranks=_model("Ranks", count=_need(Ranks), spread=_map(_Range | Empty), memory_gb=list[Figures],
                 token_skew=Figure, tokens_per_s_per_gpu=Figure, layers=list[Count], bubble=Figure) | Empty,
)  # fmt: skip

# --- its profile, a sweep, a probe and a bundle ----------------------------------------------------------------------

_WORK: dict[str, Any] = {"group": _need(str), "time_ms": _need(Number), "share": _need(Number), "calls": _need(Number)}
_PHASE: dict[str, Any] = {"phase": _need(str)} | dict.fromkeys(("cpu_ms", "device_ms", "idle_ms"), _need(Number))
_Kernels = _model(
    "kernels.json", device=_need(str), gpu=_need(Text), steps=_need(Positive), window_ms=_need(Number),
    busy_share=_need(Number), busy_share_unprofiled=_need(Figure), host_waits_ms=Figure,
    idle=_need(_model("Idle", ms=_need(Number), gaps=_need(Number))),
    step_ms=_need(_model("StepMs", _FiguresDocument, before=_need(Figure), profiled=_need(Number))),
    groups=_need(_list(_model("Group", **_WORK))), phases=_need(_list(_model("ProfiledPhase", **_PHASE))),
    kernels=_need(_list(_model("Kernel", name=_need(str), mean_us=_need(Figure), **_WORK))),
    communication=_model("Communication", total_ms=_need(Number), exposed_ms=_need(Number),
                         overlap_share=_need(Figure)) | None,
)  # fmt: skip
_Job = _model("Job", run=_need(str), what=_need(str), state=_need(str), reason=Text, wall_s=Figure)
_Hash = _model("Hash", sha256=str)

MODELS: dict[str, type[FileModel]] = {
    "machine.json": _Machine, "state.json": _State, "phases.json": _Phases, "applied.json": _Applied,
    "spec.json": _Spec, "summary.json": _Summary, "kernels.json": _Kernels,
    "manifest.json": _model("manifest.json", files=_need(_map(_Hash))),
    "sweep.json": _model("sweep.json", at=_need(str), ends_at=Figure, running=_need(list[str]),
                         jobs=_need(_list(_Job))),
    ".lock": _model(".lock", pid=_need(Integer), start=Count, boot=Text, host=_need(str)),
    "probe/*.json": _model(
        "probe/*.json", machine=_Machine, device=_model("Device", kind=Text) | None,
        products=_map(_model("Products", best_tflops=Figure) | None), memory=Figures | None,
        host_link=Figures | None, capacity=Figures | None, launch_us=Figure,
    ),
}  # fmt: skip


def model_of(path: Path) -> type[FileModel]:
    """Return the pydantic model for a JSON file, by the name of the file (`state.json`) or its folder (`probe`)."""
    return MODELS.get(path.name) or MODELS.get(f"{path.parent.name}/*.json", FileModel)


def check(document: Any, model: type[BaseModel]) -> None:
    """Raise ValueError if a JSON document does not fit its pydantic model. The message names the first wrong key."""
    try:
        model.model_validate(document)
    except ValidationError as error:
        problems = [each for each in error.errors(include_url=False, include_input=False) if "Empty" not in each["loc"]]
        problem = next((each for each in problems if each["type"] in _NUMBER_PROBLEMS), problems[0])
        keys = takewhile(lambda key: "[" not in key, map(str, problem["loc"]))  # later keys name alternatives of a type
        # Models have upper-case names.
        location = ".".join(key for key in keys if not key[:1].isupper() and key != "constrained-float")
        raise ValueError(f"{location[:80] or 'the content'}: {problem['msg']}") from None
