"""Formulas for the memory of a training step in bytes, with one function for each kind of tensor.

Saved tensors were recorded with torch.autograd.graph.saved_tensors_hooks and a storage tracker, on fake tensors (torch
2.13, transformers 5.17, peft 0.21, trl 1.14). The formulas agree with allocations on an H200
(docs/evidence/memory-estimates.md)."""
