"""Run the cells of a study one after another within a time limit, resume, and keep the files that are published."""

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from ftbench.store import machine  # noqa: E402
from ftbench.store.rundir import first_gpu, read_json  # noqa: E402

MEMORY = Path("/dev/shm/ftbench-study")  # the disk cannot hold all weights (up to 65 GB per model)
KEPT = ("spec.json", "machine.json", "applied.json", "steps.csv", "phases.json", "summary.json", "state.json",
        "agreement.json", "parity.json", "summary.md", "plain.json", "kernels.json", "sitting.json")  # fmt: skip
BEGIN, END = "<!-- written by the study -->\n", "<!-- end -->\n"
START_S, IMPORT_S = 40, 15  # seconds for imports, loading and exit, and those for imports
TINY_STEPS, TINY_S, LARGE_GB = 4, 20, 40  # memory holds the weights of one model that is larger


@dataclass(frozen=True)
class Cell:
    """One run: its name, the shipped config, the changes, and its expected seconds with and without the creation of
    weights.

    `tiny` is the model for a trial without a GPU. If the machine has several GPUs, the run sees only `gpu`.
    """

    name: str
    config: str
    sets: tuple[str, ...]
    model: str
    tiny: str
    train_s: float
    weights_s: float = 0.0
    weights_gb: float = 0.0
    gpu: str = ""
    command: str = "run"

    def runs(self, folder: Path) -> list[Path]:
        """Return the finished runs of this cell, newest last."""
        found = [path.parent for path in sorted(folder.glob(f"{self.name}/*/state.json"))]
        ended = [path for path in found if read_json(path / "state.json").get("state") in ("ok", "oom")]
        return ended or [path.parent for path in folder.glob(f"{self.name}/*/plain.json")]  # a plain script


class Study:
    """Runs cells in the given order. Weights of other models are deleted when the next ones need their space.

    With two `jobs`, the next cell imports its libraries while one uses the GPU. Expected times then exclude imports.
    """

    def __init__(self, out: Path, minutes: float, tiny: bool = False, jobs: int = 1) -> None:
        self.out, self.end, self.tiny, self.jobs = out.resolve(), time.monotonic() + 60 * minutes, tiny, jobs
        self.lock, self.under_way_s, self.last_round = threading.Lock(), 0.0, float("inf")
        self.free_at = time.monotonic() + (IMPORT_S if jobs > 1 else 0)  # expected time at which the GPU becomes free
        self.env = os.environ | {"HF_HUB_OFFLINE": "1"}
        self.env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
        if "FTBENCH_CACHE" not in os.environ and MEMORY.parent.is_dir() and not tiny:
            self.env["FTBENCH_CACHE"] = str(MEMORY)

    @property
    def left_s(self) -> float:
        """The seconds that remain when the GPU is expected to be free."""
        return self.end - max(time.monotonic(), self.free_at)

    def run(self, cells: list[Cell], rounds: int = 1) -> int:
        """Run the missing cells in rounds. Large models follow one another. Return the number of incomplete cells."""
        for _, group in groupby(cells, lambda cell: cell.weights_gb > LARGE_GB and cell.model):
            with ThreadPoolExecutor(self.jobs) as pool:
                list(pool.map(lambda each: self._missing(*each), product(range(1, rounds + 1), group)))
        return sum(len(cell.runs(self.out)) < rounds for cell in cells)

    def _missing(self, number: int, cell: Cell) -> None:
        if number > self.last_round or len(cell.runs(self.out)) >= number:
            return
        with self.lock:
            left = self.left_s
            needed = self.expected_s(cell)
            if left <= needed:
                self.last_round = number  # shorter cells may follow, but not in the next round
                print(f"{cell.name}: not run: needs {needed:.0f} s and {left:.0f} s are left", flush=True)
                return
            self.under_way_s += needed
            self.free_at = self.end - left + needed
            self._make_room(cell)
        print(f"{cell.name}: {self._run(cell, needed, left)}", flush=True)
        with self.lock:
            self.under_way_s -= needed
            self.free_at = time.monotonic() + self.under_way_s

    def expected_s(self, cell: Cell) -> float:
        return TINY_S if self.tiny else cell.train_s + (0 if self.weights(cell.model) else cell.weights_s)

    def _run(self, cell: Cell, needed: float, left: float) -> str:
        sets = [*cell.sets, f"name={cell.name}", f"launch.timeout_s={min(left, 120 + 2 * needed):.0f}"]
        begin, before = time.monotonic(), {*self.out.glob(f"{cell.name}/*/state.json")}
        command = ["timeout", "--foreground", f"{max(1.0, self.end + 10 - begin):.0f}", sys.executable, "-m", "ftbench"]
        command += [cell.command, f"configs/{cell.config}.yaml", "--yes", f"--out={self.out}"]
        command += [f"--set={text}" for text in (*sets, *(self.smaller(cell) if self.tiny else ()))]
        env = self.env | ({"CUDA_VISIBLE_DEVICES": cell.gpu} if cell.gpu else {})
        ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        if made := {*self.out.glob(f"{cell.name}/*/state.json")} - before:
            state = read_json(max(made, key=os.path.getmtime))
            took = f"{state['state']}, {time.monotonic() - begin:.0f} s"
            return took + (f": {state['reason']}" if state.get("reason") else "")
        lines = ended.stderr.strip().splitlines() or ["no message"]
        errors = [line for line in lines if line.startswith("ftbench: ") and not line.startswith("ftbench: note: ")]
        return f"skipped: {(errors or lines)[0 if errors else -1]}"

    def smaller(self, cell: Cell) -> list[str]:
        """Return the changes that make a cell small enough for a trial."""
        shape = ("max_length=512", "image_size=[56, 56]")
        if "llava" not in cell.config:
            shape = ("max_length=64", "like=null", "length=null")
        data = (f"dataset.{text}" for text in (*shape, "samples=16", "mean_length=20"))
        return [f"model.id={cell.tiny}", f"train.max_steps={TINY_STEPS}", "train.batch_size=2", *data]

    def _folder(self) -> Path:
        return Path(self.env.get("FTBENCH_CACHE") or machine.cache_dir()) / "models"

    def weights(self, model: str) -> list[Path]:
        return [path for path in self._folder().glob("*") if path.name.startswith(model.replace("/", "-"))]

    def _make_room(self, cell: Cell) -> None:
        """Delete the weights of other models if the disk has no room for those of the cell."""
        folder = self._folder()
        for path in folder.glob("*") if folder.is_dir() and not self.tiny else ():
            if shutil.disk_usage(folder).free < 1.05e9 * cell.weights_gb and path not in self.weights(cell.model):
                shutil.rmtree(path, ignore_errors=True)  # does nothing for a file


class SideBySide(Study):
    """Runs cells on all GPUs at once. Each GPU takes the next missing cell and has an equal share of the CPUs.

    Without these shares, the threads of the runs delay each other. A cell imports its libraries while another one uses
    the GPU.
    """

    def run(self, cells: list[Cell], rounds: int = 1) -> int:
        gpus = [gpu["uuid"] for gpu in machine.gpus(count=16)]
        if not gpus:
            return super().run(cells, rounds)
        minutes, cpus, waiting = self.left_s / 60, sorted(os.sched_getaffinity(0)), iter(cells)
        share, studies = len(cpus) // len(gpus), [Study(self.out, minutes, self.tiny, jobs=2) for _ in gpus]

        def work(worker: int) -> None:
            number = worker % len(gpus)
            os.sched_setaffinity(0, cpus[number * share : (number + 1) * share])  # of this thread and its processes
            for cell in waiting:
                studies[number]._missing(1, replace(cell, gpu=gpus[number]))

        with ThreadPoolExecutor(2 * len(gpus)) as pool:
            list(pool.map(work, range(2 * len(gpus))))
        return sum(not cell.runs(self.out) for cell in cells)


def card() -> str:
    """Return the folder of this machine's results: the first word of the GPU's name, or cpu."""
    gpu = machine.gpu()
    return gpu["name"].removeprefix("NVIDIA ").split()[0].lower() if gpu else "cpu"


def keep(source: Path, target: Path, own: str = "") -> None:
    """Copy the published files of the runs below `source`, without the folder `own` and other paths of this machine."""
    for path in sorted(source.rglob("*")):
        if path.name in KEPT and ".superseded" not in path.parts and not path.parent.name.startswith("rank"):
            kept = target / path.relative_to(source)
            state, published = (read_json(each.parent / "state.json").get("state") for each in (path, kept))
            if published == "ok" and state not in ("ok", "oom"):
                continue  # a stopped run must not replace a result
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(path.read_text("utf-8").replace(own or f"{source}/", "").replace(f"{ROOT}/", ""), "utf-8")


def commit_and_card(run: Path) -> str:
    """Return the commit and the card of a run."""
    known = read_json(run / "machine.json")
    return f"{machine.short(known['ftbench']['commit'])[:8]}, {first_gpu(known)['uuid'][:12]}"


def commits_and_cards(places: Sequence[str]) -> str:
    """Return a sentence that names the commits and cards of runs, or an empty string if nothing ran."""
    return f" Commits and cards: {'; '.join(dict.fromkeys(places))}." if places else ""


def predictions(name: str, cells: list[Cell], results: Path) -> dict[str, dict]:
    """Return the last prediction made before each cell's run (results/predictions/NAME*.json), by cell name."""
    files, found = [read_json(file) for file in (ROOT / "results/predictions").glob(f"{name}*.json")], {}
    for file in sorted(files, key=lambda file: file.get("written", "")):
        for cell in cells:
            ran = [read_json(run / "state.json")["started_at"] for run in cell.runs(results)[-1:]]
            if cell.name in file["cells"] and (not ran or ran[0] > file.get("written", "")):
                found[cell.name] = file["cells"][cell.name]
    return found


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headings)} |", f"|---|{'--:|' * (len(headings) - 1)}"]
    return "\n".join(lines + [f"| {' | '.join(each)} |" for each in rows])


def main(
    doc: str, name: str, cells: list[Cell], tables: Callable[[], str], kind: type[Study] = Study, page: str = ""
) -> int:
    """Run, list or publish the cells of the study `name`, as its command line requests."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", default="")
    for option in ("--list", "--tiny", "--page", "--check"):
        parser.add_argument(option, action="store_true")
    asked = parser.parse_args()
    if asked.page or asked.check:
        return write_page(ROOT / f"docs/evidence/{page or name}.md", tables(), asked.check)
    chosen = [cell for cell in cells if any(text in cell.name for text in asked.only.split(","))]
    if not chosen:
        parser.error(f"--only {asked.only}: no cell has this text in its name; --list prints the names")
    if asked.list or asked.out is None:
        print(*(f"{cell.train_s:4.0f} s + {cell.weights_s:3.0f} s for weights of {cell.weights_gb} GB  {cell.name}"
                for cell in chosen), sep="\n")  # fmt: skip
        return 0
    missing = (study := kind(asked.out, asked.minutes, asked.tiny)).run(chosen)
    if not asked.tiny:
        keep(study.out, ROOT / "results" / card() / name)
    print(f"{len(chosen) - missing} of {len(chosen)} cells have a result; repeat the command for the others")
    return 0


def write_page(page: Path, tables: str, check: bool) -> int:
    """Replace the tables of a page. With `check`, do not write it, and return 1 if it is not current."""
    text = page.read_text("utf-8")
    before, rest = text.split(BEGIN)
    current = before + BEGIN + tables + END + rest.split(END)[1]
    if not check:
        page.write_text(current, "utf-8")
    return int(check and current != text)
