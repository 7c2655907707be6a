"""Energy and money: the arithmetic by hand, currencies never mixed, and every mistake in a price file with its line."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from ftbench.core import rows, units
from ftbench.core.hardware import canonical_name
from ftbench.errors import SpecError
from ftbench.spec.prices import Price, hourly_costs, load_prices
from ftbench.store import rundir, summary
from ftbench.store.rundir import RunDir
from ftbench.store.steps import StepsWriter
from made_runs import make_run, steps

EXAMPLE = Path(__file__).parents[2] / "configs" / "prices-example.yaml"
RENT = "rent: {per_hour: 3.6, currency: USD, date: 2026-01-02, source: a shop}"
OWNED = (
    "owned: {price: 8766, currency: USD, lifetime_years: 2, utilisation: 0.5, electricity_per_kwh: 0.5, "
    "host_idle_watts: 100, date: 2026-01-02, source: an invoice}"
)


def price_file(folder: Path, text: str) -> Path:
    path = folder / "prices.yaml"
    path.write_text(text)
    return path


def made_run(folder: Path, name: str, gpu: str | None = "NVIDIA H200", watts: float | None = 500.0) -> RunDir:
    """Twenty steps of half a second with 4 samples and 1,000 real tokens: 8 samples/s, 2,000 tokens/s, 250 J a step."""
    run = rundir.create_at(folder / "study" / name)
    rundir.write_json(run.spec_json, {"name": "study", "method": {"name": "lora"}, "model": {"id": "Qwen/Qwen3-8B"},
                                      "dataset": {"name": "sample"}, "measure": {"warmup": 1},
                                      "train": {"batch_size": 4, "gradient_accumulation_steps": 1}})  # fmt: skip
    rundir.write_json(run.machine, {"gpu": {"name": gpu, "idle_power_w": 80.0} if gpu else None})
    rundir.write_json(run.applied, {"dataset": {"name": "sample"}})
    writer = StepsWriter(run.steps)
    writer.append(
        rows.StepRow(step=i, elapsed_time_sec=0.5 * i, phase="train", step_time_s=0.5, real_tokens=1000, samples=4,
                     padded_tokens=1200, label_tokens=700, loss=2.0, peak_memory_gb=10.0, power_w=watts,
                     energy_j=None if watts is None else watts / 2)
        for i in range(1, 21)
    )  # fmt: skip
    writer.close()
    rundir.write_json(run.state, {"schema": 1, "state": "ok"})
    rundir.write_json(run.summary, summary.as_dict(summary.summarise(run)))
    return run


@pytest.fixture
def report(ftbench, monkeypatch):
    """Return a function that runs `ftbench report` successfully and returns its output."""
    monkeypatch.setenv("COLUMNS", "250")

    def call(*arguments: object) -> str:
        code, out, err = ftbench("report", *arguments)
        assert code == 0, err
        return out

    return call


@pytest.fixture
def document(report):
    return lambda *arguments: json.loads(report(*arguments, "--format", "json"))


# --- arithmetic ------------------------------------------------------------------------------------------------------


def test_hourly_costs_by_hand():
    own = {"price": 8766, "currency": "EUR", "lifetime_years": 2, "utilisation": 0.5, "date": "2026-01-02",
           "source": "a", "electricity_per_kwh": 0.5, "host_idle_watts": 100}  # fmt: skip
    rent = {"per_hour": 3.6, "currency": "USD", "date": "2026-01-02", "source": "a"}
    rented, owned = hourly_costs(Price.model_validate({"rent": rent, "owned": own}), 8, 2000, 500, 8)
    assert rented.per_1k_samples == pytest.approx(0.125)  # 28,800 samples per hour
    assert rented.per_1m_real_tokens == pytest.approx(0.5)  # 7.2 M tokens per hour
    assert owned.per_hour == pytest.approx(8766 / 8766 + 0.3)  # 8,766 hours of work; 0.6 kWh per hour
    unknown = hourly_costs(Price.model_validate({"rent": rent}), None, None, None, 8)[0]
    assert (unknown.per_1k_samples, unknown.per_1m_real_tokens) == (None, None)


def test_a_currency_may_be_in_any_case():
    rent = {"per_hour": 3.6, "date": "2026-01-02", "source": "a"}
    assert Price.model_validate({"rent": rent | {"currency": "eur"}}).rent.currency == "EUR"


@pytest.mark.parametrize(("value", "text"), [
    (None, ""), (1_600_000, "1,600,000 JPY"), (999.4, "999 JPY"), (999.7, "1,000 JPY"), (10.04, "10.0 JPY"),
    (0.04121, "0.0412 JPY"),
])  # fmt: skip
def test_money_has_three_digits_and_its_currency(value, text):
    assert units.money(value, "JPY") == text


# --- in a report -----------------------------------------------------------------------------------------------------


def test_costs_of_rent_and_purchase(tmp_path, document):
    made_run(tmp_path / "runs", "a")
    found = document(
        tmp_path / "runs", "--prices", price_file(tmp_path, f"NVIDIA H200:\n  {RENT}\n  {OWNED}\n"), "--hours", 10
    )
    rent, owned = found["cost"]["records"]
    assert (rent["way"], rent["per_hour"], rent["per_night"]) == ("rent", 3.6, 36)
    assert rent["per_1k_samples"] == pytest.approx(0.125)
    assert rent["per_1m_real_tokens"] == pytest.approx(0.5)
    # 8,766 USD over 8,766 hours, and 0.6 kW at 0.5 USD
    assert owned["per_hour"] == pytest.approx(1.3)
    (energy,) = found["energy"]["records"]
    assert energy["joules_per_1k_samples"] == pytest.approx(62_500)
    assert energy["joules_per_1m_real_tokens"] == pytest.approx(250_000)
    assert (energy["mean_watts"], energy["idle_watts"]) == pytest.approx((500, 80))
    (run,) = found["runs"]
    assert run["cost.rent.per_1k_samples"] == pytest.approx(0.125)
    assert run["cost.owned.per_hour"] == pytest.approx(1.3)
    assert (run["cost.rent.currency"], run["cost.rent.date"], run["cost.rent.source"]) == (
        "USD",
        "2026-01-02",
        "a shop",
    )
    assert run["energy.joules_per_1m_real_tokens"] == pytest.approx(250_000)


def test_every_format_shows_cost_source_and_gpu_energy(tmp_path, report):
    made_run(tmp_path / "runs", "a")
    prices = price_file(tmp_path, f"H200 SXM: {{{RENT}}}")
    for name in ("table", "md", "html"):
        out = report(tmp_path / "runs", "--prices", prices, "--format", name)
        for text in ("0.125 USD", "0.500 USD", "28.8 USD", "a shop", "2026-01-02", "GPU only", "250,000"):
            assert text.lower() in out.lower()
    (row,) = csv.DictReader(io.StringIO(report(tmp_path / "runs", "--prices", prices, "--format", "csv")))
    assert float(row["cost.rent.per_1m_real_tokens"]) == pytest.approx(0.5)


@pytest.mark.parametrize("terms", [RENT, OWNED])
def test_runs_are_sorted_by_the_cost_of_samples(tmp_path, terms, document):
    for name, gpu in (("a", "NVIDIA H200"), ("b", "NVIDIA H100 80GB HBM3")):
        made_run(tmp_path / "runs", name, gpu=gpu)
    dearer = terms.replace("3.6", "7.2").replace("8766", "9999")
    prices = price_file(tmp_path, f"H100 SXM5: {{{terms}}}\nH200 SXM: {{{dearer}}}\n")
    for column, order in (("1k samples", ["b", "a"]), ("-1k samples", ["a", "b"])):
        runs = document(tmp_path / "runs", "--prices", prices, "--sort", column)["runs"]
        assert [run["run_id"] for run in runs] == order


def test_currencies_are_not_compared(tmp_path, document):
    made_run(tmp_path / "runs", "a")
    made_run(tmp_path / "runs", "b", gpu="NVIDIA H100 80GB HBM3")
    yen = OWNED.replace("USD", "JPY")
    prices = price_file(tmp_path, f"NVIDIA H200:\n  {RENT}\n  {yen}\nH100 SXM5:\n  {yen}\n")
    found = document(tmp_path / "runs", "--prices", prices)
    records = found["cost"]["records"]
    assert sorted((record["gpu"], record["way"], record["currency"]) for record in records) == [
        ("NVIDIA H100 80GB HBM3", "owned", "JPY"), ("NVIDIA H200", "owned", "JPY"), ("NVIDIA H200", "rent", "USD"),
    ]  # fmt: skip
    assert any("not converted" in note for note in found["cost"]["notes"])
    assert not any("USD" in text and "JPY" in text for text in found["cost"]["text"])


def test_cheapest_recipe_is_per_currency(tmp_path, document):
    made_run(tmp_path / "runs", "a")
    made_run(tmp_path / "runs", "b", gpu="NVIDIA H100 80GB HBM3")
    dearer = RENT.replace("3.6", "7.2")
    found = document(
        tmp_path / "runs", "--prices", price_file(tmp_path, f"H200 SXM: {{{RENT}}}\nH100 SXM5: {{{dearer}}}\n")
    )
    (sentence,) = [text for text in found["cost"]["text"] if "cheapest" in text]
    assert "rent: 1,000 samples are cheapest with lora at batch 4 on NVIDIA H200, 0.125 USD" in sentence
    assert "on NVIDIA H100 80GB HBM3 they are 0.250 USD" in sentence


def test_unknown_power_leaves_ownership_cost_empty(tmp_path, document):
    made_run(tmp_path / "runs", "a", watts=None)
    found = document(tmp_path / "runs", "--prices", price_file(tmp_path, f"H200 SXM:\n  {RENT}\n  {OWNED}\n"))
    rent, owned = found["cost"]["records"]
    assert rent["per_hour"] == 3.6
    assert owned["per_hour"] is owned["per_1k_samples"] is None
    assert any("power was not measured" in note for note in found["cost"]["notes"])
    assert "energy" not in found


def test_gpu_without_a_price_is_noted(tmp_path, document):
    made_run(tmp_path / "runs", "a")
    made_run(tmp_path / "runs", "b", gpu="NVIDIA L4")
    found = document(tmp_path / "runs", "--prices", price_file(tmp_path, f"H200 SXM: {{{RENT}}}"))
    assert any(note.startswith("NVIDIA L4: no price in prices.yaml") for note in found["cost"]["notes"])
    assert [record["gpu"] for record in found["cost"]["records"]] == ["NVIDIA H200"]


def test_prices_of_other_gpus_are_noted(tmp_path, report):
    made_run(tmp_path / "runs", "a", gpu="NVIDIA L4")
    prices = price_file(tmp_path, f"H200 SXM: {{{RENT}}}")
    for name in ("table", "html"):
        assert "NVIDIA L4: no price in prices.yaml" in report(tmp_path / "runs", "--prices", prices, "--format", name)


def test_price_of_two_driver_names_is_noted_once(tmp_path, document):
    made_run(tmp_path / "runs", "a", gpu="NVIDIA A100 80GB PCIe")
    made_run(tmp_path / "runs", "b", gpu="NVIDIA A100-SXM4-80GB")
    found = document(tmp_path / "runs", "--prices", price_file(tmp_path, f"A100 80GB: {{{RENT}}}"))
    assert len(found["cost"]["records"]) == 2
    assert len(found["cost"]["notes"]) == 1


def test_no_prices_no_costs(tmp_path, document):
    made_run(tmp_path / "runs", "a")
    found = document(tmp_path / "runs")
    assert "cost" not in found
    assert not any(key.startswith("cost.") for key in found["runs"][0])


# --- the price file --------------------------------------------------------------------------------------------------


def test_example_price_file_is_valid():
    prices = load_prices(EXAMPLE)
    assert prices.of("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition").owned.price == 1_600_000
    assert prices.of("NVIDIA H100 PCIe").owned.price == 4_700_000
    for price in prices.by_gpu.values():
        assert all("example" in terms.source for terms in (price.rent, price.owned) if terms)


@pytest.mark.parametrize(("name", "found"), [
    ("NVIDIA H200", "H200 SXM"), ("H200 SXM", "H200 SXM"), ("NVIDIA L40", "NVIDIA L40"),
])  # fmt: skip
def test_price_file_accepts_table_and_driver_names(name, found):
    assert canonical_name(name) == found


def test_unknown_gpu_can_be_priced_if_a_run_used_it(tmp_path):
    path = price_file(tmp_path, f"NVIDIA L40: {{{RENT}}}")
    assert load_prices(path, ["NVIDIA L40"]).of("NVIDIA L40").rent.per_hour == 3.6
    with pytest.raises(SpecError, match="unknown GPU, and not a GPU of these runs"):
        load_prices(path)


MISTAKES = {
    "": "the file is empty; a price file needs a GPU",
    f"NVIDIA H20O: {{{RENT}}}": "prices.yaml:1: NVIDIA H20O: unknown GPU, and not a GPU of these runs",
    f"NVIDIA H200: {{{RENT}}}\nH200 SXM: {{{RENT}}}": "prices.yaml:2: H200 SXM: is the same GPU as 'NVIDIA H200'",
    "H200 SXM: {}": "prices.yaml:1: H200 SXM: needs `rent:`, `owned:` or both",
    "H200 SXM:\n  rnt: {}": "prices.yaml:2: H200 SXM.rnt: no such key; did you mean rent? (allowed: rent, owned)",
    f"H200 SXM:\n  {RENT.replace('3.6', '-1')}": "prices.yaml:2: H200 SXM.rent.per_hour: -1 must be greater than 0",
    f"H200 SXM:\n  {RENT.replace('3.6', 'on')}": "H200 SXM.rent.per_hour: True must be a number, not on/yes/true",
    f"H200 SXM:\n  {RENT.replace('USD', '$')}": ": write three letters, such as `currency: USD`",
    f"H200 SXM:\n  {RENT.replace(', source: a shop', '')}": "prices.yaml:2: H200 SXM.rent.source: is missing",
    f"H200 SXM:\n  {OWNED.replace('0.5, elec', '1.5, elec')}": "utilisation: 1.5 must be less than or equal",
    f"H200 SXM:\n  {OWNED.replace('electricity_per_kwh: 0.5, ', '')}": "`host_idle_watts` needs `electricity_per_kwh`",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_price_file_errors_name_the_line(tmp_path, text):
    path = price_file(tmp_path, text)
    with pytest.raises(SpecError) as refused:
        load_prices(path)
    assert str(path) in str(refused.value)
    assert MISTAKES[text] in str(refused.value)


def test_price_file_errors_are_reported_together(tmp_path, ftbench):
    made_run(tmp_path / "runs", "a")
    path = price_file(tmp_path, "H200 SXM:\n  rent: {per_hour: 0, currency: us}\n")
    code, out, err = ftbench("report", tmp_path / "runs", "--prices", path)
    assert (code, out, err.count("\n")) == (2, "", 4)
    assert ftbench("report", tmp_path / "runs", "--prices", tmp_path / "none.yaml")[0] == 2


def test_cost_of_a_run_without_files_of_its_ranks_counts_every_gpu(ftbench, tmp_path):
    make_run(tmp_path, "a", steps(seed=1), spec={"launch.gpus": 2, "launch.strategy": "ddp"})
    file = tmp_path / "prices.yaml"
    file.write_text("H200 SXM: {rent: {per_hour: 3.6, currency: USD, date: 2026-01-02, source: a shop}}\n")
    said = json.loads(ftbench("report", tmp_path / "made", "--prices", file, "--format", "json")[1])
    assert said["runs"][0]["cost.rent.per_hour"] == said["cost"]["records"][0]["per_hour"] == 7.2


def test_table_of_runs_has_the_cost_of_rented_and_of_owned_gpus(ftbench, tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seed=2), machine={"gpu.name": "NVIDIA GB10"})
    file, dated = tmp_path / "prices.yaml", "currency: USD, date: 2026-01-02, source: a shop"
    file.write_text(
        f"H200 SXM: {{rent: {{per_hour: 3.6, {dated}}}}}\n"
        f"NVIDIA GB10: {{owned: {{price: 4700, lifetime_years: 4, utilisation: 0.5, {dated}}}}}\n"
    )
    out = ftbench("report", tmp_path / "made", "--prices", file)[1].partition("COST")[0]
    assert out.count(" USD") == 2
