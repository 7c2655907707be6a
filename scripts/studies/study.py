"""Run the cells of a study one after another within a time limit, resume, and keep the files that are published."""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from ftbench.store import machine  # noqa: E402
from ftbench.store.rundir import read_json  # noqa: E402

MEMORY = Path("/dev/shm/ftbench-study")  # weights of up to 65 GB, more than the disk holds
KEPT = ("spec.json", "machine.json", "applied.json", "steps.csv", "phases.json", "summary.json", "state.json",
        "agreement.json", "parity.json", "parity.md", "summary.md")  # fmt: skip
BEGIN, END = "<!-- written by the study -->\n", "<!-- end -->\n"
START_S = 40  # imports, loading and exit
TINY_STEPS, TINY_S = 4, 20


@dataclass(frozen=True)
class Cell:
    """One run: its name, the shipped config, changes, and expected seconds with and without making the weights.

    `tiny` is the model of a trial without a GPU.
    """

    name: str
    config: str
    sets: tuple[str, ...]
    model: str
    tiny: str
    train_s: float
    weights_s: float = 0.0
    weights_gb: float = 0.0

    def runs(self, folder: Path) -> list[Path]:
        """Return the runs of this cell that ended, newest last."""
        found = [path.parent for path in sorted(folder.glob(f"{self.name}/*/state.json"))]
        return [path for path in found if read_json(path / "state.json").get("state") in ("ok", "oom")]


class Study:
    """Runs cells in the given order. Weights of other models are deleted when the next ones need their space."""

    def __init__(self, out: Path, minutes: float, tiny: bool = False) -> None:
        self.out, self.end, self.tiny = out.resolve(), time.monotonic() + 60 * minutes, tiny
        self.env = os.environ | {"HF_HUB_OFFLINE": "1"}
        self.env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
        if "FTBENCH_CACHE" not in os.environ and MEMORY.parent.is_dir() and not tiny:
            self.env["FTBENCH_CACHE"] = str(MEMORY)

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    def run(self, cells: list[Cell]) -> int:
        """Run the cells that are missing. Return how many are still missing."""
        missing = 0
        for cell in cells:
            if cell.runs(self.out):
                continue
            needed = cell.train_s + (0 if self.weights(cell.model) else cell.weights_s)
            needed = TINY_S if self.tiny else needed
            reason = f"not run: needs {needed:.0f} s and {self.left_s:.0f} s are left"
            if self.left_s > needed:
                self._make_room(cell)
                reason = self._run(cell, needed)
            missing += not cell.runs(self.out)
            print(f"{cell.name}: {reason}", flush=True)
        return missing

    def _run(self, cell: Cell, needed: float) -> str:
        limit = min(self.left_s, 120 + 2 * needed)
        sets = [*cell.sets, f"name={cell.name}", f"launch.timeout_s={limit:.0f}"]
        if self.tiny:
            shape = (
                ("max_length=512", "image_size=[56, 56]") if "llava" in cell.config else ("max_length=64", "like=null")
            )
            data = (f"dataset.{text}" for text in (*shape, "samples=16", "mean_length=20"))
            sets += [f"model.id={cell.tiny}", f"train.max_steps={TINY_STEPS}", "train.batch_size=2", *data]
        begin = time.monotonic()
        command = [sys.executable, "-m", "ftbench", "run", f"configs/{cell.config}.yaml", "--yes", f"--out={self.out}"]
        command += [f"--set={text}" for text in sets]
        ended = subprocess.run(command, cwd=ROOT, env=self.env, capture_output=True, text=True, check=False)
        took = f"{time.monotonic() - begin:.0f} s"
        states = sorted(self.out.glob(f"{cell.name}/*/state.json"), key=lambda path: path.stat().st_mtime)
        if states:
            state = read_json(states[-1])
            return f"{state['state']}, {took}" + (f": {state['reason']}" if state.get("reason") else "")
        lines = ended.stderr.strip().splitlines() or ["no message"]
        return f"skipped: {next((line for line in lines if line.startswith('ftbench: ')), lines[-1])}"

    def _folder(self) -> Path:
        return Path(self.env.get("FTBENCH_CACHE") or machine.cache_dir()) / "models"

    def weights(self, model: str) -> list[Path]:
        return [path for path in self._folder().glob("*") if path.name.startswith(model.replace("/", "-"))]

    def _make_room(self, cell: Cell) -> None:
        """Delete the weights of other models if the cell's do not fit."""
        folder = self._folder()
        own = self.weights(cell.model)
        for path in folder.glob("*") if folder.is_dir() and not self.tiny else ():
            if path not in own and path.is_dir() and shutil.disk_usage(folder).free < 1.05e9 * cell.weights_gb:
                shutil.rmtree(path, ignore_errors=True)


def card() -> str:
    """Return the folder of this machine's results: the first word of the GPU's name, or cpu."""
    gpu = machine.gpu()
    return gpu["name"].removeprefix("NVIDIA ").split()[0].lower() if gpu else "cpu"


def keep(source: Path, target: Path) -> None:
    """Copy the published files of the runs below `source`, without this machine's path."""
    for path in sorted(source.glob("*/*/*")):
        if path.name in KEPT and ".superseded" not in path.parts:
            kept = target / path.relative_to(source)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(path.read_text("utf-8").replace(f"{source}/", ""), "utf-8")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headings)} |", f"|---|{'--:|' * (len(headings) - 1)}"]
    return "\n".join(lines + [f"| {' | '.join(each)} |" for each in rows])


def main(doc: str, name: str, cells: list[Cell], tables: Callable[[], str]) -> int:
    """Run, list or publish the cells of the study `name`, as its command line requests."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", default="")
    for option in ("--list", "--tiny", "--page", "--check"):
        parser.add_argument(option, action="store_true")
    asked = parser.parse_args()
    if asked.page or asked.check:
        return write_page(ROOT / f"docs/evidence/{name}.md", tables(), asked.check)
    chosen = [cell for cell in cells if any(text in cell.name for text in asked.only.split(","))]
    if asked.list or asked.out is None:
        print(*(f"{cell.train_s:4.0f} s + {cell.weights_s:3.0f} s for weights of {cell.weights_gb} GB  {cell.name}"
                for cell in chosen), sep="\n")  # fmt: skip
        return 0
    study = Study(asked.out, asked.minutes, asked.tiny)
    missing = study.run(chosen)
    if not asked.tiny:
        keep(study.out, ROOT / "results" / card() / name)
    print(f"{len(chosen) - missing} of {len(chosen)} cells have a result; repeat the command for the others")
    return 0


def write_page(page: Path, tables: str, check: bool) -> int:
    """Replace the tables of a page. With `check`, only return 1 if the page is not current."""
    text = page.read_text("utf-8")
    before, rest = text.split(BEGIN)
    current = before + BEGIN + tables + END + rest.split(END)[1]
    if not check:
        page.write_text(current, "utf-8")
    return int(check and current != text)
