"""Linear attention: layers whose state is a matrix for each head, behind a causal convolution."""
