"""ftbench measures what fine-tuning a language model costs on the machine in front of you."""

__version__ = "0.1.0"
