"""Rows of a data set on the hub as messages in a file: `python -m ftbench.worker.data.export SPEC OUT MOST [pairs]`."""

import json
import sys
from pathlib import Path
from typing import Any

from ftbench.core.data_formats import Example
from ftbench.errors import DataError, FtbenchError
from ftbench.spec.datasets import Dataset, row_example, row_format
from ftbench.worker.data.sources import open_rows


def export(dataset: Dataset, out: Path, most: int, pairs: bool = False) -> None:
    """Write every n-th of the rows, at most so many, and in the last line how many there are. What cannot be used is
    left out."""
    rows = open_rows(dataset)
    format_name = row_format(dataset, rows[0], rows.where(0), pairs)
    with out.open("w", encoding="utf-8") as file:
        for index in range(0, len(rows), -(-len(rows) // most)):
            try:
                parsed = row_example(dataset, rows[index], format_name, rows.where(index))
            except DataError:
                continue
            file.write(json.dumps(_row(parsed), ensure_ascii=False) + "\n")
    out.with_suffix(".count").write_text(json.dumps({"rows": len(rows), "format": format_name}))


def _row(parsed: Example) -> dict[str, Any]:
    if parsed.text is not None:
        return {"text": parsed.text}
    if parsed.rejected:
        return {"chosen": [*parsed.messages], "rejected": [*parsed.rejected]}
    return {"messages": [*parsed.messages]}


def main() -> int:
    """Export what the command line names; a way out on stderr where that cannot be."""
    spec, out, most, *pairs = sys.argv[1:]
    try:
        export(Dataset.model_validate_json(spec), Path(out), int(most), bool(pairs))
    except FtbenchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
