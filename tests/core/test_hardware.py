import pytest

from ftbench.core.hardware import find_gpu, gpus
from ftbench.errors import SpecError
from ftbench.estimate.gpus import gpu_named


@pytest.mark.parametrize(
    ("driver_name", "row"),
    [
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM5"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell Max-Q"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GB10", "DGX Spark GB10"),
        ("Tesla T4", "T4"),
        ("Tesla V100-PCIE-32GB", "V100 PCIe 32GB"),
    ],
)
def test_driver_names_find_their_row(driver_name, row):
    assert find_gpu(driver_name).name == row


@pytest.mark.parametrize(
    "driver_name",
    ["NVIDIA A10", "Quadro RTX 6000", "NVIDIA H800", "", "NVIDIA GeForce RTX 4080 SUPER", "NVIDIA GeForce RTX 3090 Ti",
     "NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA A100X", "NVIDIA B200A", "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
     "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 5090 D"],
)  # fmt: skip
def test_an_unknown_gpu_is_none(driver_name):
    assert find_gpu(driver_name) is None


def test_each_name_finds_its_row():
    assert [
        name for gpu in gpus() for name in gpu.match if find_gpu(f"NVIDIA {name.removeprefix('NVIDIA ')}") is not gpu
    ] == []


def test_rows_are_plausible():
    for gpu in gpus():
        assert min(gpu.memory_gb, gpu.bandwidth, gpu.watts) > 0, gpu.name
        assert gpu.bf16 is None or 10 < gpu.bf16 < 10_000, gpu.name
        assert gpu.fp8 is None or gpu.fp8 == pytest.approx(2 * gpu.bf16, rel=0.02), gpu.name
        if gpu.compute_capability:
            assert (gpu.fp8 is not None) == (gpu.compute_capability >= (8, 9)), gpu.name


def test_peaks_depend_on_the_precision():
    h200 = find_gpu("NVIDIA H200")
    assert h200.peak_tflops("bf16") == h200.peak_tflops("fp16") == 989
    assert h200.peak_tflops("fp8") == 1979
    assert h200.peak_tflops("fp32") is None
    assert find_gpu("NVIDIA RTX A6000").peak_tflops("fp8") is None


MAX_Q, SERVER, WORKSTATION = (f"RTX PRO 6000 Blackwell {kind}" for kind in ("Max-Q", "Server", "Workstation"))


@pytest.mark.parametrize(("words", "names"), [
    ("rtx4090", ["RTX 4090"]), ("4090", ["RTX 4090"]), ("GeForce RTX-4090", ["RTX 4090"]), ("h100pcie", ["H100 PCIe"]),
    ("H100", ["H100 NVL", "H100 PCIe", "H100 SXM5"]), ("h100 80GB", ["H100 PCIe", "H100 SXM5"]), ("l4", ["L4"]),
    ("a100-80gb", ["A100 80GB"]), ("A100 SXM 80GB", ["A100 80GB"]), ("A100 SXM", ["A100 80GB", "A100 40GB"]),
    ("NVIDIA A100", ["A100 80GB", "A100 40GB"]), ("A100 80GB PCIe", ["A100 80GB"]), ("H200", ["H200 NVL", "H200 SXM"]),
    ("NVIDIA H200", ["H200 SXM"]), ("RTX PRO 6000", [MAX_Q, SERVER, WORKSTATION]), ("max-q", [MAX_Q]),
    ("NVIDIA RTX PRO 6000 Blackwell", [MAX_Q, SERVER, WORKSTATION]), ("6000 ada", ["RTX 6000 Ada"]), ("40", []),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", [WORKSTATION]), ("409", []), ("4090 Laptop", []), (" ", []),
])  # fmt: skip
def test_a_name_finds_one_card_or_the_error_lists_the_choices(words, names):
    if len(names) == 1:
        assert gpu_named(words).name == names[0]
        return
    with pytest.raises(SpecError) as error:
        gpu_named(words)
    assert all(f"{name} (" in str(error.value) for name in names)
    assert ("matches several" in str(error.value)) == bool(names)
