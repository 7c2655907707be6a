"""Import Triton if it is installed (torch for CPUs does not install it). Without Triton, `triton` is None."""

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr, tensor
except ImportError:
    triton = tl = constexpr = tensor = None

jit = triton.jit if triton else lambda kernel: kernel
__all__ = ["constexpr", "jit", "tensor", "tl", "triton"]
