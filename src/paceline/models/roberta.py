"""RoBERTa (model_type roberta): BERT, whose positions begin behind the padding token's."""

from paceline.models.config_bert import DEFAULTS, bert_family

_DEFAULTS = DEFAULTS | {"vocab_size": 50265, "pad_token_id": 1}
ARCHITECTURE = bert_family(
    "roberta.",
    defaults=_DEFAULTS,
    after_pad=True,
    head=("classifier.dense", "classifier.out_proj"),
)
