"""LLM: the front door: options and prompts in, outputs out.

Here live the `LLM` and its asyncio twin, boot, which joins engine and runner, and what a prompt
must meet before it is queued.  It wires rooms and decides nothing.  What may not live here: HTTP,
and any library a GPU box without the extras lacks: this room runs on torch, numpy, safetensors and
tokenizers.
"""
