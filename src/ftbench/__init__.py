"""ftbench measures what fine-tuning a language model costs on your own machine."""

__version__ = "0.1.0"
