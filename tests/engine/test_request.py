"""A request's own facts: what its siblings share with it."""

from paceline.core.sampling_params import SamplingParams
from paceline.engine.request import Request

SAMPLED = SamplingParams(seed=3, max_tokens=8, n=3, logprobs=2, prompt_logprobs=1)


def test_siblings_differ_from_the_first_in_seed_id_and_whose_prompt_is_scored() -> None:
    first = Request.make("a", [5, 6, 7], SAMPLED, context_len=64, salt="tenant")
    second, third = first.sibling(1), first.sibling(2)
    for index, other in enumerate((second, third), start=1):
        assert (other.index, other.parent_id, other.leader) == (index, "a", first)
        assert (other.prompt_ids, other.max_len) == (first.prompt_ids, first.max_len)
        assert other.salt == "tenant"
        assert (other.params.logprobs, other.params.prompt_logprobs) == (2, None)
    assert len({first.request_id, second.request_id, third.request_id}) == 3
    assert len({first.params.seed, second.params.seed, third.params.seed}) == 3
    second.token_ids.append(9)
    assert (first.num_known, third.num_known) == (3, 3)
