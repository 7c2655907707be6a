"""Formulas for the memory of a training step, one function per term, in bytes.

The saved tensors were read from autograd (torch.autograd.graph.saved_tensors_hooks and a storage tracker on fake
tensors, torch 2.13, transformers 5.17, peft 0.21, trl 1.14). They agree with an H200's allocations; see
docs/evidence/memory-estimates.md."""
