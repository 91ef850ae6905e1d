"""The tokenizer adds special tokens once and renders chat as transformers does."""

import json
import sys
import threading
import time

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from paceline.core.errors import ModelError, RequestError
from paceline.text.tokenizer import Tokenizer

BOS, EOS = "<s>", "</s>"
TEMPLATE = """{{ bos_token }}{% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {% if message.role == 'assistant' %}
[A]{% generation %}{{ message.content }}{% endgeneration %}{{ eos_token }}
    {% elif message.role == 'user' %}
[U]{{ message.content | tojson }}
    {% else %}
{{ raise_exception('unknown role ' + message.role) }}
    {% endif %}
{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"""
MESSAGES = [
    {"role": "user", "content": "<a> & 'b' é"},
    {"role": "tool", "content": "skipped"},
    {"role": "assistant", "content": "fine"},
]


def _core(adds_bos: bool) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["some text to learn from"], trainer)
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A",
            pair=f"{BOS} $A $B:1",
            special_tokens=[(BOS, core.token_to_id(BOS))],
        )
    return core


def _folder(tmp_path, *, adds_bos=True, **config):
    _core(adds_bos).save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": {"content": EOS, "lstrip": False}} | config
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("adds_bos", "add_bos_token", "expected"),
    [
        (True, None, 1),
        (True, True, 1),
        (True, False, 0),
        (False, None, 0),
        (False, True, 1),
        (False, False, 0),
    ],
)
def test_the_begin_token_is_added_as_configured_and_once(
    tmp_path, adds_bos, add_bos_token, expected
):
    tokenizer = Tokenizer.from_folder(
        _folder(tmp_path, adds_bos=adds_bos, add_bos_token=add_bos_token)
    )
    bos = tokenizer.bos_token_id
    assert tokenizer.encode("text").count(bos) == expected
    assert tokenizer.encode("").count(bos) == expected
    assert tokenizer.encode(f"{BOS}text").count(bos) == 1
    assert tokenizer.encode("text", add_special_tokens=False).count(bos) == 0


@pytest.mark.parametrize(
    ("adds_bos", "add_bos_token", "expected"),
    [(True, None, 1), (True, False, 0), (False, None, 0), (False, True, 1)],
)
def test_a_pair_begins_as_one_text_does(tmp_path, adds_bos, add_bos_token, expected):
    folder = _folder(tmp_path, adds_bos=adds_bos, add_bos_token=add_bos_token)
    tokenizer = Tokenizer.from_folder(folder)
    bos, plain = tokenizer.bos_token_id, tokenizer.encode("texta", add_special_tokens=False)
    num_second = int(adds_bos)  # who adds none here has one type
    begun, wanted = [bos, *plain], [bos] * expected + plain
    assert tokenizer.encode_pair("text", "a") == (wanted, len(wanted) - num_second)
    assert tokenizer.encode_pair(f"{BOS}text", "a") == (begun, len(begun) - num_second)


def test_special_ids_and_round_trip(tmp_path):
    tokenizer = Tokenizer.from_folder(_folder(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.vocab_size == tokenizer._core.get_vocab_size()
    ids = [*tokenizer.encode("naïve 😀 text"), 1]
    assert tokenizer.decode(ids) == "naïve 😀 text"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{BOS}naïve 😀 text{EOS}"


@pytest.mark.parametrize("where", ["config", "named", "jinja", "json"])
def test_chat_renders_as_transformers_does(tmp_path, where):
    in_config = {
        "config": {"chat_template": TEMPLATE},
        "named": {"chat_template": [{"name": "default", "template": TEMPLATE}]},
    }
    folder = _folder(tmp_path, **in_config.get(where, {}))
    if where == "jinja":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    if where == "json":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    ours = Tokenizer.from_folder(folder)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=BOS,
        eos_token=EOS,
        chat_template=TEMPLATE,
    )
    for add_generation_prompt in (True, False):
        expected = theirs.apply_chat_template(
            MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        rendered = ours.render_chat(MESSAGES, add_generation_prompt=add_generation_prompt)
        assert rendered == expected


def test_chat_ids_hold_one_begin_token(tmp_path):
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, chat_template=TEMPLATE))
    assert tokenizer.has_chat_template
    ids = tokenizer.apply_chat_template(MESSAGES)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat(MESSAGES)


def test_the_date_and_template_variables_reach_the_template(tmp_path):
    template = "{{ strftime_now('%Y') }} {{ flavour }}"
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, chat_template=template))
    year, flavour = tokenizer.render_chat([], flavour="dry").split()
    assert len(year) == 4
    assert flavour == "dry"


def test_a_template_cannot_reach_the_interpreter(tmp_path):
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, chat_template=template))
    with pytest.raises(RequestError, match="access to attribute '__class__'"):
        tokenizer.render_chat([])


def test_messages_a_template_refuses_are_refused(tmp_path):
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, chat_template=TEMPLATE))
    text = r"messages must be what .* accepts, got its refusal: unknown role judge; check roles"
    with pytest.raises(RequestError, match=text):
        tokenizer.render_chat([{"role": "judge", "content": ""}])


def test_a_model_without_chat_template_says_so(tmp_path):
    tokenizer = Tokenizer.from_folder(_folder(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(ModelError, match="chat must be sent to a model with a chat template, got "):
        tokenizer.apply_chat_template(MESSAGES)


def test_a_broken_template_is_named_with_its_line_and_only_chats_need_it(tmp_path):
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, chat_template="line one\n{% if %}"))
    assert tokenizer.encode("text")
    assert not tokenizer.has_chat_template
    with pytest.raises(ModelError, match=r"chat template must be a valid .* got line 2: "):
        tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize("templates", [[], [5], [{"name": "default"}], [{"template": "a"}]])
def test_a_list_without_a_default_template_has_none(tmp_path, templates):
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, chat_template=templates))
    assert not tokenizer.has_chat_template


def test_a_template_that_is_no_text_is_named(tmp_path):
    folder = _folder(tmp_path)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template.jinja must be text in UTF-8, got "):
        Tokenizer.from_folder(folder)


def test_a_missing_tokenizer_is_named(tmp_path):
    text = r"tokenizer must be tokenizer.json in the model folder, got .* without it; save"
    with pytest.raises(ModelError, match=text):
        Tokenizer.from_folder(tmp_path)


def test_a_git_lfs_pointer_is_told_from_a_damaged_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid x")
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'tokenizer.json'} must be a tokenizer in the tokenizers format, got a Git "
        "LFS pointer: the repository was cloned without its large files; run git lfs pull there, "
        "or name the hub id"
    )


def test_unreadable_files_are_named(tmp_path):
    folder = _folder(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config.json must be valid JSON, got "):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer_config.json must be a JSON object, got list"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match=r"tokenizer.json must be a tokenizer in the tokenizers"):
        Tokenizer.from_folder(folder)


def test_prompts_that_are_no_text_are_refused(tmp_path):
    tokenizer = Tokenizer.from_folder(_folder(tmp_path))
    with pytest.raises(RequestError, match="prompt must be a string, got int; pass str"):
        tokenizer.encode(5)
    with pytest.raises(RequestError, match="prompt must be valid Unicode, got a lone surrogate at"):
        tokenizer.encode("a\ud800")


def test_jinja2_is_only_needed_for_chat(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    assert Tokenizer.from_folder(_folder(tmp_path)).encode("text")
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, chat_template=TEMPLATE))
    assert tokenizer.encode("text")
    with pytest.raises(ModelError, match="chat template must be the jinja2 package, got an insta"):
        tokenizer.apply_chat_template(MESSAGES)


def test_other_threads_run_while_a_text_is_tokenized(tmp_path):
    tokenizer = Tokenizer.from_folder(_folder(tmp_path))
    beats: list[None] = []
    is_done = threading.Event()

    def beat() -> None:
        while not is_done.is_set():
            beats.append(None)
            time.sleep(0)

    other = threading.Thread(target=beat)
    other.start()
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody is made to give way
    try:
        before = len(beats)
        tokenizer.encode("a text of many words " * 5_000)
        between = len(beats) - before
    finally:
        sys.setswitchinterval(switch_s)
        is_done.set()
        other.join()
    assert between > 10
