"""The gated activations: config.json's name of each -> the kernel's."""

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
