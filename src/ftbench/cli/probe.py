"""`ftbench probe`."""

from __future__ import annotations

from pathlib import Path

from ftbench.cli.shared import Json, Out, app, emit, tell


@app.command()
def probe(out: Out = Path("results"), as_json: Json = False) -> None:
    """Measure this machine's ceilings, in a minute at most: products, memory, links, power."""
    from ftbench.probe import command
    from ftbench.probe.text import as_text

    tell(f"probing this machine, {command.LIMIT_S:.0f} s at the most")
    document, path = command.probe(out)
    emit(document if as_json else f"{as_text(document)}\nfile        {path}")
