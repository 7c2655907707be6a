"""Memory terms, compared with published rules, real models, and measurements on an H200."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftbench.core.hardware import cublas_workspace
from ftbench.estimate.memory import ends, layer, transient, weights
from ftbench.estimate.memory.phases import MemoryCase, peak, phases, resident
from ftbench.estimate.workload.largest import BatchShape
from ftbench.estimate.workload.model import adapter_parameters
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.estimate.workload.sharding import Sharding, sharding_of
from ftbench.facts import architectures
from ftbench.families import describe
from ftbench.families.shape import ModelShape
from ftbench.spec.experiment import Launch
from ftbench.spec.methods import PROJECTIONS

GIB, GB = 2**30, 10**9
EVERYWHERE = frozenset(PROJECTIONS)
LORA = TrainingPlan(adapter=4, rank=8, targets=EVERYWHERE)
QLORA = TrainingPlan(adapter=2, rank=8, targets=EVERYWHERE, quantised=True, upcast=4)


def model(name: str) -> ModelShape:
    return describe(architectures()[name])


def test_rules_of_thumb_are_special_cases() -> None:
    """1600, 412 and 103 GB for 100 B parameters: float32 and AdamW in full, 1 % LoRA, 8-bit weights with 1 % LoRA."""
    n, adapted = 100 * 10**9, 10**9

    def total(weight_bytes: float, count: int, width: float) -> float:
        trained = count * width if count != n else 0
        states = count * width + weights.optimizer_state("adamw_torch", count, width)
        return (n * weight_bytes + trained + states) / GB

    assert total(4, n, 4) == 1600
    frozen = n * 4 / GB
    states = (adapted * 4 + weights.optimizer_state("adamw_torch", adapted, 4)) / GB
    assert frozen + states == 412
    small = (adapted * 1 + weights.optimizer_state("adamw_torch", adapted, 1)) / GB
    assert n / GB + small == 103


def test_weights_of_qwen3_8b_agree_with_a_measurement() -> None:
    """results/h200/qwen3-8b-frontier: weights_gb_by_dtype of the applied.json files."""
    shape = model("Qwen/Qwen3-8B")
    assert weights.weights(shape, LORA) / GIB == pytest.approx(15.2564, abs=1e-4)
    assert weights.adapters(shape, LORA) / GIB == pytest.approx(0.08130, abs=1e-5)
    linear = shape.linear_parameters
    assert linear / 2 / GIB == pytest.approx(3.234375)
    assert (shape.total - linear) * 4 / GIB == pytest.approx(4.63787, abs=1e-4)
    assert adapter_parameters(shape, QLORA.targets, QLORA.rank) == 21_823_488


def test_double_quantization_agrees_with_its_paper() -> None:
    """Dettmers et al. 2023: constants take 0.5 bits a parameter, and 0.127 quantised again."""
    n = 10**9
    assert (weights.four_bit(n, False) - n / 2) * 8 / n == pytest.approx(0.5)
    assert (weights.four_bit(n, True) - n / 2) * 8 / n == pytest.approx(0.127, abs=0.001)


def test_mxfp4_is_four_and_a_quarter_bits() -> None:
    shape = model("openai/gpt-oss-20b")
    assert (shape.weight_bytes(2) - shape.weight_bytes(2, mxfp4=True)) * 8 / shape.expert_matrices == 16 - 4.25


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "openai/gpt-oss-120b"])
def test_fused_experts_stay_in_16_bits(name: str) -> None:
    shape = model(name)
    quantised = TrainingPlan(adapter=2, rank=8, quantised=True)
    assert weights.weights(shape, quantised) > shape.parameters["experts"] * 2


def test_experts_of_gpt_oss_keep_their_format() -> None:
    """docs/how-to/gpt-oss.md: 12.8 and 60.8 GiB, and the largest matrix of a layer written out: 1.0 and 4.0."""
    recipe = TrainingPlan(adapter=4, rank=8, quantised=True, mxfp4=True, packed_experts=True)
    for name, held, written in (("openai/gpt-oss-20b", 12.8, 1.0), ("openai/gpt-oss-120b", 60.8, 4.0)):
        shape = model(name)
        assert weights.weights(shape, recipe) / GIB == pytest.approx(held, abs=0.05)
        assert transient.dequantised(shape.layers[0], recipe) / GIB == pytest.approx(written, abs=0.05)


def test_frozen_weights_in_eight_bits_are_as_large_as_in_sixteen_and_smaller_than_in_thirty_two() -> None:
    """Two layouts of 8 bits (worker/optimizations/fp8.py)."""
    shape = model("Qwen/Qwen3-8B")
    assert weights.weights(shape, TrainingPlan(fp8=True)) == weights.weights(shape, TrainingPlan())
    wide = weights.weights(shape, TrainingPlan(weight=4)) - weights.weights(shape, TrainingPlan(weight=4, fp8=True))
    assert wide == 2 * shape.linear_parameters
    trained = {"full": True, "weight": 4}  # trained weights keep their format
    assert weights.weights(shape, TrainingPlan(fp8=True, **trained)) == weights.weights(shape, TrainingPlan(**trained))


@pytest.mark.parametrize("compiled", [False, True])
def test_eight_bit_products_save_no_extra_input(compiled: bool) -> None:
    shape, batch = model("Qwen/Qwen3-8B"), BatchShape(4, 2048, 8188)
    given = {"adapter": 4, "rank": 8, "targets": EVERYWHERE, "compiled": compiled}
    first = shape.layers[0]
    assert (
        layer.saved(first, TrainingPlan(fp8=True, **given), batch) == layer.saved(first, TrainingPlan(**given), batch)  # type: ignore[arg-type]
    )


def test_offloaded_checkpoints_leave_two_or_three_on_the_device_and_none_in_the_loss() -> None:
    shape, batch = model("Qwen/Qwen3-8B"), BatchShape(4, 2048, 8188)

    def marks(checkpointing: str, phase: str) -> float:
        recipe = TrainingPlan(adapter=4, rank=8, targets=EVERYWHERE, checkpointing=checkpointing)  # type: ignore[arg-type]
        return phases(MemoryCase(shape, recipe, batch))[phase]["checkpoints"]

    assert marks("offload", "forward") * 18 == marks("full", "forward")
    assert marks("offload", "loss") == 0.0
    assert marks("offload", "backward, last layer") * 12 == marks("full", "backward, last layer")


def test_a_compiled_chunked_loss_has_no_float32_logits() -> None:
    shape, batch = model("Qwen/Qwen3-8B"), BatchShape(4, 2048, 8188)
    eager, compiled, small = (ends.logits(shape, TrainingPlan(loss="chunked", **more), batch)  # type: ignore[arg-type]
                              for more in ({}, {"compiled": True}, {"chunk": 256}))  # fmt: skip
    assert (eager, compiled, small) == (2048 * 151936 * 12, 2048 * 151936 * 4, 256 * 151936 * 12)
    one = BatchShape(1, 1024, 1023)
    assert ends.logits(shape, TrainingPlan(loss="chunked"), one) == 1023 * 151936 * 12


def test_only_autocast_copies_the_head() -> None:
    plan = TrainingPlan(quantised=True, upcast=4)
    shape = model("Qwen/Qwen3-8B")
    casts = [ends.head_cast(shape, replace(plan, autocast=on)) for on in (True, False)]
    assert casts == [2 * 151936 * 4096, 0]


def test_pairs_need_float32_logits_and_their_gradient() -> None:
    shape, plan, batch = model("Qwen/Qwen3-8B"), TrainingPlan(loss="pairs", adapter=4), BatchShape(2, 512, 1022)
    assert ends.logits(shape, plan, batch) == 2 * 512 * 151936 * 8


def test_unsloth_keeps_the_experts_of_gpt_oss_in_four_bits() -> None:
    """The founding study trained gpt-oss-120b on 96 GB with unsloth, and with nothing else (facts/seed figures)."""
    shape = model("openai/gpt-oss-120b")
    assert weights.weights(shape, TrainingPlan(quantised=True, unsloth=True, packed_experts=True)) / GIB < 75
    assert weights.weights(shape, TrainingPlan(quantised=True)) / GIB > 200


def test_activations_of_lora_agree_with_the_measured_slope() -> None:
    """GiB per sample of 2,048 tokens, between batch 2 and 7 of results/h200/qwen3-8b-frontier."""
    shape = model("Qwen/Qwen3-8B")

    def slope(recipe: TrainingPlan) -> float:
        two, six = (peak(phases(MemoryCase(shape, recipe, BatchShape(b, 2048, b * 2047))))[1] for b in (2, 6))
        return (six - two) / 4 / GIB

    assert slope(LORA) == pytest.approx((123.646 - 46.678) / 5, rel=0.005)
    assert slope(QLORA) == pytest.approx((128.586 - 49.470) / 4, rel=0.002)
    assert slope(TrainingPlan(full=True)) == pytest.approx((138.509 - 79.048) / 4, rel=0.002)


def test_the_optimizer_step_sets_the_peak_of_a_small_batch_in_full_fine_tuning() -> None:
    shape = model("Qwen/Qwen3-8B")
    small = MemoryCase(shape, TrainingPlan(full=True), BatchShape(1, 2048, 2047))
    large = MemoryCase(shape, TrainingPlan(full=True), BatchShape(4, 2048, 8188))
    assert peak(phases(small))[0] == "optimizer step"
    assert peak(phases(large))[0] == "loss"
    fused = MemoryCase(shape, TrainingPlan(full=True, optimizer="adamw_torch_fused"), BatchShape(1, 2048, 2047))
    assert peak(phases(fused))[1] < peak(phases(small))[1]


def test_optimizer_states_have_their_documented_size() -> None:
    n = 10**6
    assert weights.optimizer_state("sgd", n, 2) == 0
    assert weights.optimizer_state("adamw_torch", n, 2) == 4 * n
    assert weights.optimizer_state("adamw_torchao_fp32", n, 2) == 8 * n
    assert weights.optimizer_state("adamw_torchao_bf16", n, 4) == 4 * n
    assert weights.optimizer_state("adamw_torchao_8bit", n, 2, n / 10) == pytest.approx(2.03 * n, rel=0.001)
    assert weights.optimizer_state("adamw_bnb_8bit", n, 2) == pytest.approx(2.03 * n, rel=0.001)
    assert weights.optimizer_state("adamw_bnb_8bit", n, 2, n / 10) == pytest.approx((0.9 * 2.03 + 0.8) * n, rel=0.001)
    both = [
        weights.optimizer_state("paged_adamw_8bit", n, 2, n / 10),
        weights.paged_state("paged_adamw_8bit", n, 2, n / 10),
    ]
    assert sum(both) == pytest.approx(weights.optimizer_state("adamw_bnb_8bit", n, 2, n / 10))
    assert both[0] < 0.04 * n


def test_states_of_small_adapters_are_not_paged() -> None:
    shape = model("Qwen/Qwen3-8B")
    for rank, paged in ((8, False), (64, True)):
        kept = weights.kept_by(
            shape, TrainingPlan(targets=frozenset({"q_proj", "down_proj"}), rank=rank, optimizer="paged_adamw_8bit")
        )
        assert (weights.paged_state(*kept) > 0) is paged
    assert weights.paged_state(*weights.kept_by(shape, TrainingPlan(full=True, optimizer="paged_adamw_8bit"))) > 8e9


@settings(max_examples=30)
@given(st.sampled_from(sorted(architectures())), st.integers(1, 64), st.integers(2, 8192))
def test_every_memory_optimization_saves_memory(name: str, rows: int, length: int) -> None:
    """Checkpointing keeps less than half of the layers' activations, selective more, offloading less."""
    shape, batch = model(name), BatchShape(rows, length, rows * (length - 1))

    def acts(**options: object) -> float:
        recipe = TrainingPlan(adapter=4, rank=8, targets=frozenset({"q_proj"}), **options)  # type: ignore[arg-type]
        found = phases(MemoryCase(shape, recipe, batch))["loss"]
        return found["activations"] + found["checkpoints"]

    assert acts(checkpointing="full") < acts(checkpointing="selective") < acts()
    assert acts(offload=True) < acts()
    assert acts(checkpointing="unsloth") <= acts(checkpointing="full")


@settings(max_examples=30)
@given(st.sampled_from(sorted(architectures())), st.integers(1, 64), st.integers(2, 4096))
def test_a_larger_batch_never_needs_less(name: str, rows: int, length: int) -> None:
    shape = model(name)
    for recipe in (
        LORA,
        QLORA,
        TrainingPlan(full=True, checkpointing="full"),
        TrainingPlan(full=True, attention="eager"),
    ):
        one, more, longer = (peak(phases(MemoryCase(shape, recipe, BatchShape(r, n, r * (n - 1)))))[1]
                             for r, n in ((rows, length), (rows + 1, length), (rows, length + 16)))  # fmt: skip
        assert one <= more
        assert one <= longer


def test_a_chunked_loss_has_the_logits_of_one_chunk() -> None:
    shape = model("Qwen/Qwen3-8B")
    small, large = BatchShape(1, 1024, 1023), BatchShape(64, 1024, 64 * 1023)
    assert ends.logits(shape, LORA, small) == ends.logits(shape, LORA, large) == 256 * 151936 * 16


def divided(strategy: str, gpus: int) -> Sharding:
    """`zero3 params`: the parameters are offloaded."""
    name, _, offload = strategy.partition(" ")
    return sharding_of(Launch(gpus=gpus, strategy=name, offload=offload or "none"))  # type: ignore[arg-type]


def states(strategy: str, gpus: int, **recipe: object) -> dict[str, dict[str, float]]:
    """The phases of Qwen3-8B on one short row, GiB: nearly nothing but weights, gradients and the optimizer's state."""
    plan = MemoryCase(
        model("Qwen/Qwen3-8B"), TrainingPlan(full=True, **recipe), BatchShape(1, 8, 7), sharding=divided(strategy, gpus)
    )  # type: ignore[arg-type]
    return {name: {part: size / GIB for part, size in parts.items()} for name, parts in phases(plan).items()}


def test_shares_of_several_gpus() -> None:
    def held(strategy: str, gpus: int) -> float:
        plan = MemoryCase(
            model("Qwen/Qwen3-8B"), TrainingPlan(full=True), BatchShape(1, 8, 7), sharding=divided(strategy, gpus)
        )
        return sum(resident(plan).values()) / GIB

    assert held("none", 1) == pytest.approx(15.2564 * 3, rel=1e-4)
    assert held("ddp", 8) == pytest.approx(15.2564 * 4, rel=1e-4)  # the buckets are one more copy of the gradients
    assert held("zero1", 8) == held("zero2", 8) == pytest.approx(15.2564 * (1 + 6 / 8), rel=1e-4)
    assert held("zero1", 8) > held("fsdp", 8) > held("zero3 optimizer", 8) > held("zero3 params", 8)


def test_states_of_zero3_are_16_bytes_of_each_parameter_as_its_paper_says() -> None:
    """Rajbhandari et al. 2020: 2 + 2 + 12, divided; beside them are weights that are gathered, and the embedding's
    gradient as a whole."""
    parts = states("zero3", 4)["backward, embedding"]
    beside = parts["gathered layers"] + 2 * 622_329_856 / GIB
    assert sum(parts.values()) - beside == pytest.approx(16 * 8_190_735_360 / 4 / GIB, rel=1e-3)


def test_casts_of_a_step_are_sharded() -> None:
    """Float32 weights under autocast: whole on one GPU, of a layer at a time where they are divided."""
    wide = {"weight": 4, "upcast": 4}
    assert states("ddp", 4, **wide)["forward"]["cast weights"] > 12.9
    for strategy in ("zero3", "fsdp"):
        assert states(strategy, 4, **wide)["forward"]["cast weights"] == 0
        assert sum(states(strategy, 4, **wide)["forward"].values()) < 16 * 8.19e9 / 4 / GIB + 6


MOE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"model_type": "mamba"}, "mamba"), ({"hidden_size": 0}, "hidden_size"), ({"vocab_size": None}, "vocab_size"),
     ({"num_hidden_layers": "36"}, "num_hidden_layers"), ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
     ({"head_dim": -3}, "head_dim"), ({"sliding_window": "x"}, "sliding_window"),
     ({"head_dim": None, "hidden_size": 16}, "num_attention_heads"), ({"layer_types": ["sliding_attention"]}, "layer"),
     (MOE | {"num_experts": "x"}, "num_experts"), (MOE | {"num_experts_per_tok": 16}, "must be at most 8"),
     ({"vision_config": {"hidden_size": 8}}, "num_hidden_layers")],
)  # fmt: skip
def test_an_invalid_config_is_an_error_that_names_the_key(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        describe({**architectures()["Qwen/Qwen3-8B"], **change})


def test_a_mask_costs_its_square_in_every_layer() -> None:
    shape, batch = model("Qwen/Qwen3-8B"), BatchShape(4, 1024, 4 * 1023)
    first = shape.layers[0]
    plain = layer.attention(first, LORA, batch)
    masked = layer.attention(first, TrainingPlan(adapter=4, rank=8, attention="masked"), batch)
    assert (masked - plain) * batch.tokens == 4 * 1024**2 * 2 + batch.tokens * 2 * 2 * (first.query - first.key)


@pytest.mark.parametrize(
    ("capability", "kib"),
    [((8, 0), 8320), ((9, 0), 32768), ((10, 0), 32768), ((10, 3), 8320), ((12, 0), 8320)],
)
def test_the_cublas_workspace_depends_on_the_gpu(capability, kib):
    assert cublas_workspace(capability) == kib * 1024
