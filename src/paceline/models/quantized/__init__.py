"""Checkpoints whose weights are codes and scales: a file for each method that writes them.

`read_quantization` finds a config.json's method and refuses, before a byte of weights is read, what
is not served.  `Dequantised` shows such a checkpoint as one of plain numbers, which are what its
format's definition says they are.
"""
