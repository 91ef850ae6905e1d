"""Text: strings to tokens and back, and messages to the text a model was tuned on.

Here live the tokenizer's file, chat templates in their sandbox, and the detokenizer.  What may not
live here: requests, models and torch.
"""
