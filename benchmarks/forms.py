"""Tokens of an answer with a form for each step that held it, without drafts and with them.

    python benchmarks/forms.py --algorithm NGRAM

One engine, the bundled model on a CPU, one request at a time; each once with `speculative` off and
once on, in turns.  Texts must be equal.  Steps are those of the receipt that are no prefill, forced
drafts those accepted ones that the schema left no choice about.  The time is processor time of the
process.  The last line is JSON.
"""

import argparse
import json
import time
from dataclasses import replace

from paceline.core.request.sampling_params import SamplingParams
from paceline.core.request.structured import structured_outputs
from paceline.engine.answers.outputs import RequestOutput
from paceline.llm.llm import LLM
from paceline.plan.machine import versions

SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 8},
        "years_of_age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city_of_birth": {"enum": ["Paris", "Berlin", "Buenos Aires"]},
        "is_registered": {"type": "boolean"},
    },
    "required": ["first_name", "years_of_age", "city_of_birth", "is_registered"],
    "additionalProperties": False,
}
PROMPT = "def answer():\n    return "


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", default="NGRAM", help="who drafts")
    parser.add_argument("--topk", type=int, default=1, help="branches")
    parser.add_argument("--requests", type=int, default=8)
    given = parser.parse_args()
    with LLM(
        "bundled",
        threads=1,
        max_num_seqs=4,
        max_model_len=256,
        speculative_algorithm=given.algorithm,
        speculative_eagle_topk=given.topk,
    ) as llm:
        found = {False: Sum(), True: Sum()}
        for seed in range(-1, given.requests):  # the first warms up
            drawn = SamplingParams(
                temperature=0.8 * (seed % 2),
                seed=seed % 1000,
                max_tokens=160,
                receipt=True,
                structured_outputs=structured_outputs({"json": SCHEMA}),
            )
            texts = set()
            for drafts in (False, True):
                start_s = time.process_time()
                [output] = llm.generate(PROMPT, replace(drawn, speculative=drafts))
                texts.add(output.outputs[0].text)
                if seed >= 0:
                    found[drafts].add(output, time.process_time() - start_s)
            assert len(texts) == 1, f"drafts changed a text: {texts}"
    plain, drafted = found[False], found[True]
    for name, each in (("without drafts", plain), ("with drafts", drafted)):
        print(
            f"{name:15} {each.tokens} tokens, {each.steps} steps, "
            f"{each.tokens / each.steps:.2f} tokens a step, {each.forced} forced, "
            f"{each.accepted} accepted, {1e3 * each.cpu_s / each.tokens:.2f} ms a token"
        )
    document = {
        "algorithm": given.algorithm,
        "topk": given.topk,
        "tokens": plain.tokens,
        "steps": [plain.steps, drafted.steps],
        "forced": drafted.forced,
        "accepted": drafted.accepted,
        "cpu_s": [round(plain.cpu_s, 3), round(drafted.cpu_s, 3)],
        "versions": versions(),
    }
    print(json.dumps(document))


class Sum:
    """Counts over answers."""

    def __init__(self) -> None:
        self.tokens = self.steps = self.forced = self.accepted = 0
        self.cpu_s = 0.0

    def add(self, output: RequestOutput, cpu_s: float) -> None:
        metrics = output.metrics
        assert metrics is not None, "it has ended"
        assert metrics.receipt is not None, "it asks for a receipt"
        self.tokens += metrics.output_tokens
        phases = metrics.receipt.phases
        self.steps += sum(phase.steps for phase in phases if phase.phase != "prefill")
        self.forced += metrics.forced_tokens
        self.accepted += sum(metrics.accepted_by_position)
        self.cpu_s += cpu_s


if __name__ == "__main__":
    main()
