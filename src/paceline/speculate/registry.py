"""Which folder drafts for each value of --speculative-algorithm."""

from paceline.speculate.drafter import Algorithm
from paceline.speculate.eagle.drafter import EAGLE, EAGLE3
from paceline.speculate.mtp.drafter import MTP
from paceline.speculate.ngram.drafter import NGRAM
from paceline.speculate.standalone.drafter import STANDALONE

# In the order in which a draft model's config.json is asked what it describes.
ALGORITHMS: dict[str, Algorithm] = {
    each.name: each for each in (EAGLE3, EAGLE, STANDALONE, MTP, NGRAM)
}
