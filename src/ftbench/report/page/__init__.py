"""One self-contained HTML page: sections of markup, data for what is drawn on demand."""
