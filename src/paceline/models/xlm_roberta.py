"""XLM-RoBERTa (model_type xlm-roberta): RoBERTa over other tokens."""

from paceline.models.config_bert import DEFAULTS, bert_family

_DEFAULTS = DEFAULTS | {"pad_token_id": 1}
ARCHITECTURE = bert_family(
    "roberta.",
    defaults=_DEFAULTS,
    after_pad=True,
    head=("classifier.dense", "classifier.out_proj"),
    model_type="xlm-roberta",
)
