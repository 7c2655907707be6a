"""The training process. Only this package imports transformers, trl and peft. `kernels` also imports torch."""
