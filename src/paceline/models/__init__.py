"""Models: one file per architecture, named after its Hugging Face model_type.

Here live the architectures, the reading of config.json and safetensors, the finding of models by
name, the shapes shipped for dummy weights, and the bundled model.  What may not live here: caches,
scheduling, or a layer that two architectures share (that goes to `layers`).
"""
