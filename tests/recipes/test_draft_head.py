"""The draft head's recipe: what training simulates, what drafting does, and what text is written.

Everything is checked on random models of a few numbers, against transformers or by hand.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

RECIPES = Path(__file__).parents[2] / "recipes"

sys.path.append(str(RECIPES))

from continue_rows import continue_rows  # noqa: E402
from draft_head import default_taps, load_head, save_head, target_pass  # noqa: E402
from draft_tree import (  # noqa: E402
    Candidate,
    Node,
    Shape,
    accepted_per_round,
    choose,
    draft,
    num_accepted,
    read_text,
)
from train_head import head_loss, lesson, new_head, simulate  # noqa: E402

VOCAB, DRAFT_VOCAB, TOKENS = 24, 16, 14


@pytest.fixture
def target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture
def head(target):
    draft_ids = torch.cat([torch.arange(8), torch.arange(12, 20)])
    head = new_head(target, draft_ids, width=24)
    for norm in (head.norm, head.midlayer.hidden_norm, head.midlayer.input_layernorm):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    torch.nn.init.normal_(head.fc.weight, std=0.2)
    for projection in head.midlayer.self_attn.children():  # so that what is seen matters
        torch.nn.init.normal_(projection.weight, std=0.5)
    return head.requires_grad_(False)


@pytest.fixture
def tokens():
    return torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(1))


def features_of(target, tokens):
    return target_pass(target, tokens[None], default_taps(6)).features[0]


def logits_by_rereading(head, table, tokens, taps, *, start, steps):
    """Logits of a chain from `start`, fed tokens[start + 2...]: every pass reads all rows again."""
    feature = head.fc(taps[: start + 1])
    found = []
    for step in range(steps):
        rows = torch.arange(start + 1 + step)
        q, k, v = head.qkv(table[tokens[rows + 1]], feature, rows)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        last = head.finish(feature, attended)[-1]
        found.append(head.logits(last))
        feature = torch.cat([feature, last[None]])
    return torch.stack(found)


def test_the_features_are_the_layers_outputs_low_first(target, tokens):
    hidden = target(tokens[None], output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[layer + 1] for layer in (1, 2, 2)], dim=-1)
    torch.testing.assert_close(target_pass(target, tokens[None], (1, 2, 2)).features, expected)
    assert default_taps(12) == (1, 5, 8)


@pytest.mark.parametrize("start", [0, 3, TOKENS - 4])
def test_a_simulated_step_is_the_pass_that_drafting_makes(target, head, tokens, start):
    table, taps = target.model.embed_tokens.weight, features_of(target, tokens)
    simulated = [
        logits[0, start] for _, logits in simulate(head, table[tokens][None], taps[None], 3)
    ]
    expected = logits_by_rereading(head, table, tokens, taps, start=start, steps=3)
    torch.testing.assert_close(torch.stack(simulated), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("position", range(TOKENS - 1))
def test_a_chain_drafts_the_likeliest_token_of_every_pass(target, head, tokens, position):
    table, taps = target.model.embed_tokens.weight, features_of(target, tokens)
    prefix = read_text(head, table, tokens, taps)
    nodes = draft(head, table, prefix, position, Shape(3, 1, 3))
    fed = tokens[: position + 2].tolist()
    for depth in range(3):
        logits = logits_by_rereading(
            head, table, torch.tensor(fed), taps, start=position, steps=depth + 1
        )[-1]
        fed.append(int(head.target_ids[logits.argmax()]))
    assert nodes == [Node(token, at - 1) for at, token in enumerate(fed[position + 2 :])]


def test_a_tree_keeps_the_likeliest_paths(target, head, tokens):
    """Two levels of all draft ids: every path is scored here, one by one."""
    table, taps = target.model.embed_tokens.weight, features_of(target, tokens)
    prefix = read_text(head, table, tokens, taps)
    nodes = draft(head, table, prefix, 4, Shape(2, DRAFT_VOCAB, 12))
    first = logits_by_rereading(head, table, tokens, taps, start=4, steps=1)[0].log_softmax(-1)
    scores = {}
    for one, token in enumerate(head.target_ids.tolist()):
        scores[(token,)] = float(first[one])
        fed = torch.cat([tokens[:6], torch.tensor([token])])
        second = logits_by_rereading(head, table, fed, taps, start=4, steps=2)[1].log_softmax(-1)
        for two, after in enumerate(head.target_ids.tolist()):
            scores[(token, after)] = float(first[one] + second[two])
    paths = [
        (node.token,) if node.parent < 0 else (nodes[node.parent].token, node.token)
        for node in nodes
    ]
    assert set(paths) == set(sorted(scores, key=scores.get, reverse=True)[:12])
    assert any(node.parent >= 0 for node in nodes)


def test_equal_scores_keep_the_parent_before_its_child():
    candidates = [Candidate(7, -1, -1.0), Candidate(8, -1, -2.0), Candidate(9, 0, -1.0)]
    assert choose(candidates, 1) == [Node(7, -1)]
    assert choose(candidates, 2) == [Node(7, -1), Node(9, 0)]


# The tree a b (c below a, e below b) g below c, of tokens 1 2 3 5 7.
TREE = [Node(1, -1), Node(2, -1), Node(3, 0), Node(5, 1), Node(7, 2)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [([1, 3, 9], 2), ([2, 6], 1), ([1, 3, 7, 7], 3), ([3], 0), ([1, 5], 1), ([], 0)],
)
def test_a_path_is_followed_as_far_as_the_text_goes(text, expected):
    assert num_accepted(TREE, text) == expected


@pytest.mark.parametrize("num_prompt", [4, 5, 6])
def test_the_rounds_of_a_text_emit_all_of_it_but_the_first_token(target, head, tokens, num_prompt):
    text = head.target_ids[tokens % DRAFT_VOCAB]
    table, taps = target.model.embed_tokens.weight, features_of(target, text)
    everything = Shape(2, DRAFT_VOCAB, DRAFT_VOCAB + DRAFT_VOCAB**2)
    for shape in (Shape(1, 1, 1), Shape(3, 1, 3), Shape(3, 4, 7), everything):
        accepted = accepted_per_round(head, table, text, taps, num_prompt=num_prompt, shape=shape)
        assert sum(accepted) + len(accepted) == TOKENS - num_prompt - 1
    whole, rest = divmod(TOKENS - num_prompt - 1, 3)
    assert accepted == [2] * whole + [rest - 1] * bool(rest)


def test_a_greedy_row_is_the_text_transformers_writes(target, tokens):
    rows = torch.stack([tokens, tokens.flip(0)])
    written = continue_rows(target, rows, 6, 0.0)
    for row, own in zip(rows, written, strict=True):
        logits = target(own[None]).logits[0]
        assert own[:6].tolist() == row[:6].tolist()
        assert own[6:].tolist() == logits[5:-1].argmax(-1).tolist()


def test_the_loss_is_lowest_for_the_targets_own_distribution(target, head, tokens):
    embedded, taps, wanted = lesson(target, head, tokens[None])
    probs = target(tokens[None]).logits.float().softmax(-1)[..., head.target_ids]
    torch.testing.assert_close(wanted.float(), probs, rtol=1e-2, atol=1e-3)
    (logits,) = [logits for _, logits in simulate(head, embedded, taps, 1)]
    cross = -(wanted[:, 1:] * logits.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(head_loss(head, (embedded, taps, wanted), 1), cross)
    shifted = torch.roll(wanted, 1, dims=1)
    assert not torch.allclose(head_loss(head, (embedded, taps, shifted), 1), cross)


def test_a_saved_head_is_read_back(target, head, tokens, tmp_path):
    save_head(head, tmp_path, target.config.to_dict())
    again = load_head(tmp_path, device="cpu", dtype=torch.float32)
    for name, tensor in head.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=1e-2, atol=1e-2)
    assert torch.equal(again.target_ids, head.target_ids)
    assert again.t2d.nonzero()[:, 0].tolist() == head.target_ids.tolist()


def test_a_folder_without_weights_is_refused_by_name(tmp_path):
    with pytest.raises(SystemExit, match=r"expected a folder with model\.safetensors, got"):
        load_head(tmp_path, device="cpu", dtype=torch.float32)
