"""Judge: whether two answers of one engine, or of its like, are equal, a tie, or a bug."""

from collections.abc import Sequence

from torch import Tensor

from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.llm import LLM
from paceline.llm.teacher import TeacherForm
from paceline.proof.lossless.verdicts import Parting, Verdict, part


class Judge:
    """Asks an idle engine's target.  Raises PacelineError when the engine is busy."""

    def __init__(self, llm: LLM) -> None:
        self._teacher = llm.teacher()
        self._dtype = llm.prepared.dtype

    def part(
        self,
        prompt_ids: Sequence[int],
        wanted: Sequence[int],
        got: Sequence[int],
        params: SamplingParams,
    ) -> Parting | None:
        """Where the second answer to a prompt parts from the first; None: nowhere.  As
        `verdicts.part`.
        """

        def logits_behind(generated: Sequence[int]) -> Tensor:
            tokens = (*prompt_ids, *generated)
            return self._teacher.read(tokens, TeacherForm.plain(len(tokens))).logits

        return part(
            wanted,
            got,
            logits_behind,
            params=params,
            num_known=len(prompt_ids),
            dtype=self._dtype,
        )

    def verdict(self, parting: Parting | None) -> Verdict:
        """What it comes to."""
        return Verdict.EQUAL if parting is None else parting.verdict(self._dtype)
