"""The training process. Only this package imports transformers, trl and peft; torch is also imported by `kernels`."""
