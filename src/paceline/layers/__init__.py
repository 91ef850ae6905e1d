"""Layers: the modules models are composed of.

Here live linear, norm, rope, embedding, the attention layer (the only writer of K and V) and
sampling.  What may not live here: knowledge of one architecture, of requests, or of how a step was
prepared; a layer sees tensors and the context it is handed.
"""
