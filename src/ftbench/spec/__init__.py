"""Define the spec of a run as frozen objects, and load it from YAML files."""
