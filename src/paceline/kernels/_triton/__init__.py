"""The Triton kernels, one module per operation; imported only when one is launched."""
