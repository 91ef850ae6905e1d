"""A request's own facts: what it may take from the cache, and what its siblings share with it."""

from paceline.cache.page_keys import PageKeys
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.seeds import child_seed
from paceline.engine.request import Request, RequestState

SAMPLED = SamplingParams(seed=3, max_tokens=8, n=3, logprobs=2, prompt_logprobs=1)


def test_siblings_differ_from_the_first_in_seed_id_and_whose_prompt_is_scored() -> None:
    first = Request.make("a", [5, 6, 7], SAMPLED, context_len=64, keys=PageKeys("tenant"))
    second, third = first.sibling(1), first.sibling(2)
    for index, other in enumerate((second, third), start=1):
        assert (other.index, other.parent_id, other.leader) == (index, "a", first)
        assert (other.prompt_ids, other.max_len) == (first.prompt_ids, first.max_len)
        assert other.keys == PageKeys("tenant")
        assert (other.params.logprobs, other.params.prompt_logprobs) == (2, None)
    assert len({first.request_id, second.request_id, third.request_id}) == 3
    assert len({first.params.seed, second.params.seed, third.params.seed}) == 3
    second.token_ids.append(9)
    assert (first.num_known, third.num_known) == (3, 3)


def test_siblings_have_seeds_of_the_stream_of_the_first() -> None:
    first = Request.make("a", [5, 6], SAMPLED, context_len=64)
    assert [first.sibling(i).params.seed for i in (1, 2)] == [child_seed(3, 1), child_seed(3, 2)]


def test_a_prompt_has_its_kv_once_a_token_behind_it_is_known() -> None:
    request = Request.make("a", [5, 6, 7], SAMPLED, context_len=64)
    assert not request.has_prompt_kv
    request.token_ids.append(9)
    assert request.has_prompt_kv
    aborted = Request.make("b", [5, 6, 7], SAMPLED, context_len=64)
    aborted.state = RequestState.FINISHED
    assert aborted.has_prompt_kv  # whoever waits for it need wait no longer


def test_what_is_not_yet_scored_is_not_taken_from_the_cache() -> None:
    """Log-probabilities are of all tokens but the first: a hit may hold those before the next."""
    request = Request.make("a", [5, 6, 7], SAMPLED, context_len=64)
    limits = []
    for scored in (0, 1, 2):
        request.num_scored = scored
        limits.append(request.max_hit)
    assert limits == [0, 1, None]
    assert request.sibling(1).max_hit is None
