"""The training child: the only place that imports torch, transformers, trl and peft."""
