"""The self-contained HTML page: sections of markup, and data for charts."""
