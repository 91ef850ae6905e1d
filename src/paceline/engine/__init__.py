"""Engine: from prompts to outputs on the host.

Here live the `LLM` facade, the scheduler and both loops, the life of a request, tokenizing and
detokenizing, resolving options and the memory budget.  What may not live
here: tensors of a step, HTTP, and any library a GPU box without the extras lacks: this room runs on
torch, numpy, safetensors and tokenizers.
"""
