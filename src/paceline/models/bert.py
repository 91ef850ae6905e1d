"""BERT (model_type bert): learned positions, norms behind each block; of heads a classifier's
is read."""

from paceline.models.config_bert import DEFAULTS, bert_family

ARCHITECTURE = bert_family(
    "bert.", defaults=DEFAULTS, after_pad=False, head=("pooler.dense", "classifier")
)
