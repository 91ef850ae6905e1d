"""lm-eval's own client asks for log-likelihoods; transformers says what they are."""

import logging

import pytest
import torch
from serving import serving, small_llm

pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = [  # a context that ends with a blank would give it to what follows
    ("def add(a, b):", "\n    return a + b\n"),
    ("import os\n\n\ndef read(path):\n    with open(path) as f:", "\n        return f.read()"),
    ("class Stack:\n    def __init__(self):\n        self.items = []", "\n\n    def push(self):"),
    ("x", " = 1"),
]


def test_log_likelihoods_are_those_of_transformers():
    pytest.importorskip("lm_eval", exc_type=ImportError)
    pytest.importorskip("tenacity", exc_type=ImportError)
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logging.disable(logging.INFO)
    llm = small_llm()
    folder = str(llm.prepared.source.tokenizer.parent)
    with serving(llm) as server:
        api = LocalCompletionsAPI(
            model="tiny",
            base_url=f"{server.url}/v1/completions",
            tokenizer=folder,
            tokenizer_backend="huggingface",
            batch_size=2,
            max_retries=1,
            max_length=256,
        )
        asked = [
            Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=at)
            for at, pair in enumerate(TEXTS)
        ]
        found = api.loglikelihood(asked, disable_tqdm=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for (context, rest), (told, is_greedy) in zip(TEXTS, found, strict=True):
        begin = tokenizer(context)["input_ids"]
        whole = tokenizer(context + rest)["input_ids"]
        with torch.inference_mode():
            scores = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        places = range(len(begin), len(whole))
        expected = sum(float(scores[at - 1, whole[at]]) for at in places)
        assert abs(told - expected) < 1e-3
        assert is_greedy == all(int(scores[at - 1].argmax()) == whole[at] for at in places)
