"""Grammars of the forms of answers: masks are llguidance's own decision for every token."""

import random

import llguidance
import llguidance.hf
import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Core
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from paceline.core.errors import RequestError
from paceline.core.request.structured import StructureKind, structured_outputs
from paceline.engine.grammar import Grammar
from paceline.models.locate import BUNDLED_FOLDER as BUNDLED
from paceline.text.structured import StructureCompiler
from paceline.text.tokenizer import Tokenizer

END, VOCAB = 0, 4096
PERSON = '{"type":"object","properties":{"name":{"type":"string"}},"required":["name"]}'
FORMS = {
    "regex": r"[0-9]{2,3}-(ab|ä)+",
    "choice": ["yes", "yes, sir", 'no "never"\n', "ähm"],
    "grammar": 'start: "a" b\nb: /x+/ | "y"',
}


def one_of(letter):
    fields = {f"{letter}{i}": {"type": "string", "maxLength": i + 1} for i in range(20)}
    return {
        "anyOf": [
            {"type": "object", "properties": {name: field}, "required": [name]}
            for name, field in fields.items()
        ]
    }


# More than llguidance holds, which it finds out late.
LARGE = {"allOf": [one_of("a"), one_of("b"), one_of("c")]}
# The same in the words of llguidance.
THEIRS = {
    "regex": llguidance.LLMatcher.grammar_from_regex(FORMS["regex"]),
    "choice": llguidance.LLMatcher.grammar_from_regex('(yes|yes, sir|no "never"\\n|ähm)'),
    "grammar": llguidance.LLMatcher.grammar_from_lark(FORMS["grammar"]),
    "json": llguidance.LLMatcher.grammar_from_json_schema(
        PERSON, overrides={"whitespace_pattern": r" |\n[ \t]{0,24}|\r\n[ \t]{0,24}"}
    ),
    "json_object": llguidance.LLMatcher.grammar_from_json_schema(
        '{"type": "object"}', overrides={"whitespace_pattern": r" |\n[ \t]{0,24}|\r\n[ \t]{0,24}"}
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(BUNDLED)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return StructureCompiler(tokenizer, vocab_size=VOCAB, end_ids=[END])


def form_of(kind, said=None):
    wanted = {"json": PERSON, "json_object": True, **FORMS}[kind] if said is None else said
    return structured_outputs({kind: wanted})


def allowed_by(grammar, vocab=VOCAB):
    words = np.zeros(-(-vocab // 32), dtype=np.int32)
    grammar.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return set(bits[:vocab].nonzero()[0].tolist())


@pytest.mark.parametrize("kind", THEIRS)
def test_masks_are_what_llguidance_says_of_each_token(compiler, kind):
    """Theirs is asked token by token, over the tokenizer as transformers has it."""
    core = Core.from_file(str(BUNDLED / "tokenizer.json"))
    theirs = llguidance.hf.from_tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=core), n_vocab=VOCAB, eos_token=END
    )
    matcher = llguidance.LLMatcher(theirs, THEIRS[kind], log_level=0)
    ours, choose = compiler.grammar(form_of(kind)).fork(), random.Random(kind)
    for _ in range(12):
        allowed = allowed_by(ours)
        single = {token for token in range(VOCAB) if matcher.validate_tokens([token]) == 1}
        is_forced = bool(matcher.compute_ff_tokens())  # a text may have several spellings: one is
        assert allowed - {END} <= single if is_forced else allowed - {END} == single - {END}
        assert (END in allowed) == matcher.is_accepting()
        token = choose.choice(sorted(allowed - {END}))
        ours.accept(token)
        assert matcher.consume_token(token)
        assert ours.is_done == matcher.is_stopped()
        if ours.is_done:
            break


def test_what_is_made_is_what_the_engine_calls_a_grammar(compiler):
    assert isinstance(compiler.grammar(form_of("regex")), Grammar)


def test_a_fork_goes_on_by_itself(compiler, tokenizer):
    made = compiler.grammar(form_of("choice"))
    one, other = made.fork(), made.fork()
    before = allowed_by(made)
    one.accept(tokenizer.encode("no")[0])
    assert allowed_by(one) != allowed_by(other) == before == allowed_by(made)


@pytest.fixture(scope="module")
def marked():
    """A tokenizer with a token that is text, as those of calls are, with one that is none, and
    with one that takes the blanks around its text out of it."""
    core = Core.from_file(str(BUNDLED / "tokenizer.json"))
    core.add_tokens([AddedToken("<tool_call>", normalized=False, special=False)])
    core.add_special_tokens(["<|end|>"])
    core.add_tokens([AddedToken("<gap>", lstrip=True, rstrip=True, normalized=False)])
    return Tokenizer(core, {})


@pytest.fixture(scope="module")
def of_marked(marked):
    return StructureCompiler(marked, vocab_size=VOCAB + 100, end_ids=[END])


@pytest.mark.parametrize(
    "said",
    [
        "a<tool_call>\n",
        "<|end|>",
        "<|end|><tool_call><|end|>x",
        "x<tool_call><tool_call>",
        "a <gap>  b<gap>\n",
    ],
)
def test_a_forced_text_that_reads_like_an_added_token_can_be_said(marked, of_marked, said):
    spelled = spelled_by(of_marked.grammar(form_of("choice", [said])).fork())
    assert marked.decode(spelled) == said
    assert spelled.count(VOCAB) == said.count("<tool_call>")  # as the model knows them
    assert VOCAB + 1 not in spelled


def spelled_by(grammar):
    spelled = []
    while not grammar.is_done and (allowed := allowed_by(grammar, VOCAB + 100) - {END}):
        spelled.append(min(allowed))
        grammar.accept(spelled[-1])
    return spelled


def test_of_added_tokens_those_that_are_text_may_stand_in_a_text(of_marked, compiler):
    found = allowed_by(of_marked.grammar(form_of("regex", "(?s:.*)")), VOCAB + 100)
    plain = allowed_by(compiler.grammar(form_of("regex", "(?s:.*)")))
    assert found == plain | {VOCAB, VOCAB + 2}


def test_a_grammar_may_name_added_tokens_whether_they_are_text(marked, of_marked):
    """And texts, regexes and remarks that read like one are what they are."""
    told = 'start: <|end|> <tool_call> a // "<gap>\na: "\\"<tool_call>" /\\/<gap>/ <gap>'
    spelled = spelled_by(of_marked.grammar(form_of("grammar", told)).fork())
    assert spelled[:2] == [VOCAB + 1, VOCAB]
    assert spelled[-1] == VOCAB + 2
    assert marked.decode(spelled[2:-1]) == '"<tool_call>/<gap>'


@pytest.mark.parametrize("vocab", [VOCAB + 100, VOCAB - 100])
def test_a_vocabulary_may_be_padded_or_cut(tokenizer, vocab):
    whole = StructureCompiler(tokenizer, vocab_size=VOCAB, end_ids=[END])
    other = StructureCompiler(tokenizer, vocab_size=vocab, end_ids=[END])
    found = allowed_by(other.grammar(form_of("json")), vocab)
    assert found == {t for t in allowed_by(whole.grammar(form_of("json"))) if t < vocab}


def test_several_end_tokens_are_allowed_where_the_form_is_whole(tokenizer):
    compiler = StructureCompiler(tokenizer, vocab_size=VOCAB, end_ids=[END, 7])
    grammar = compiler.grammar(form_of("regex", "a*")).fork()
    assert {END, 7} <= allowed_by(grammar)
    assert not {END, 7} & allowed_by(compiler.grammar(form_of("regex", "a+")))


def test_a_text_is_compiled_once_and_the_last_ones_are_kept(compiler):
    first = compiler.grammar(form_of("regex", "a"))
    assert compiler.grammar(form_of("regex", "a")) is first
    for number in range(32):
        compiler.grammar(form_of("regex", f"b{number}"))
    assert compiler.grammar(form_of("regex", "a")) is not first
    assert len(compiler._made) == 32


def test_gbnf_is_read_too(compiler, tokenizer):
    grammar = compiler.grammar(form_of("grammar", 'root ::= "a" ("b" | "c")')).fork()
    grammar.accept(tokenizer.encode("a")[0])
    assert {tokenizer.token(token)[0] for token in allowed_by(grammar)} == {"b", "c"}


@pytest.mark.parametrize(
    ("kind", "said", "told"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "a(?=b)", "look-around, including look-ahead and look-behind, is not supported"),
        ("grammar", "start: b", "b"),
        ("grammar", "nothing of it", "Expected ::="),
        ("grammar", "root ::= foo", "foo"),
        ("grammar", 'root ::= "\\', "index out of range"),
        ("json", "{", "line 1 column 2"),
        ("json", '{"type": "text"}', "Invalid type: text"),
        ("json", "[" * 5000, "recursion"),
        ("choice", ["\ud800"], "escape"),
        ("json", LARGE, "got panic: assertion failed"),
    ],
)
def test_a_fault_is_told_by_its_part(compiler, kind, said, told):
    with pytest.raises(RequestError) as caught:
        compiler.grammar(form_of(kind, said))
    text = str(caught.value)
    assert text.startswith(f"structured_outputs.{kind} must be a form that can be followed token")
    assert told in text
    assert "backtrace" not in text
    assert len(text) < 600


def test_a_tokenizer_that_cannot_be_read_refuses_forms_alone(tmp_path):
    """Whoever asks for none does not notice."""
    core = Core(WordLevel({"<end>": 0, "a": 1}, unk_token="<end>"))
    core.save(str(tmp_path / "tokenizer.json"))
    words = Tokenizer.from_folder(tmp_path)
    compiler = StructureCompiler(words, vocab_size=2, end_ids=[END])
    assert "decoder" in compiler.prepare()
    assert compiler.prepare() == compiler.prepare()
    expected = "structured_outputs must be left out, as llguidance cannot read this model's token"
    with pytest.raises(RequestError, match=f"^{expected}.*decoder"):
        compiler.grammar(form_of("regex"))


def test_what_is_made_is_known(compiler):
    assert not compiler.knows(form_of("regex", "known?"))
    compiler.grammar(form_of("regex", "known?"))
    assert compiler.knows(form_of("regex", "known?"))


def test_a_form_that_needs_too_much_ends_where_it_does(compiler):
    """Between two steps there is no time for it."""
    grammar = compiler.grammar(form_of("regex", "(a?){5000}a{5000}x")).fork()
    with pytest.raises(RequestError, match=r"structured_outputs\.regex must be a form that can"):
        walk(grammar, 3)


def walk(grammar, num_tokens):
    for _ in range(num_tokens):
        grammar.accept(min(allowed_by(grammar)))


def test_kinds_are_the_keys_of_a_request():
    assert [each.value for each in StructureKind] == [
        "json",
        "json_object",
        "regex",
        "choice",
        "grammar",
    ]
