"""The memory of a training step, term by term: a function a term, in bytes, from shapes alone.

What is saved for the backward pass was read from autograd itself (torch.autograd.graph.saved_tensors_hooks and a
storage tracker on fake tensors, torch 2.13, transformers 5.17, peft 0.21, trl 1.14) and agrees with what an H200
allocated; `docs/evidence/memory-estimates.md` has the table.
"""
