"""Chat templates: as transformers renders them, refusals in their words (B34), and no way to run away or to look around."""

import time
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import Code, StatusError
from services.gateway.models import load_model
from services.gateway.text import sandbox
from services.gateway.text.template import MAX_SOURCE_CHARS, ChatTemplate
from services.text.gguf_metadata import ModelError
from services.text.tokenizer import SpecialTokens
from tests.unit.text.vocabularies import smollm2_path, smollm2_reference

SPECIAL = SpecialTokens(bos="<s>", eos="</s>")
USER, ASSISTANT, SYSTEM = ({"role": role, "content": f"a {role}'s word"} for role in ("user", "assistant", "system"))
ALTERNATING = """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {{ message['content'] + eos_token}}
    {% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% endfor %}"""


def render(source: str, messages: Any = (USER,), **options: Any) -> str:
    return ChatTemplate(source, SPECIAL).render(messages, **options)


@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [USER, USER]])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_smollm2_renders_as_transformers_does(messages: list[dict[str, str]], add_generation_prompt: bool) -> None:
    template = load_model(smollm2_path(), "m").template
    assert template is not None
    expected = smollm2_reference().apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert template.render(messages, add_generation_prompt=add_generation_prompt) == expected


def test_special_tokens_and_trimmed_blocks() -> None:
    rendered = render(ALTERNATING, [USER, ASSISTANT, USER])
    assert " ".join(rendered.split()) == "<s> [INST] a user's word [/INST] a assistant's word</s> [INST] a user's word [/INST]"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([USER, USER], "must alternate"),
        ([ASSISTANT], "must alternate"),
        ([USER, ASSISTANT, SYSTEM], "alternate"),
        ([USER, SYSTEM], "Only user and"),
    ],
)
def test_b34_the_templates_own_words(messages: list[dict[str, str]], words: str) -> None:
    with pytest.raises(StatusError) as caught:
        render(ALTERNATING, messages)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.violations[0].field == "messages"
    assert words in caught.value.message
    assert "Traceback" not in caught.value.message


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].content | tojson }}", "\"a user's word\""), ("{{ {'b': 1, 'a': '<é>'} | tojson }}", '{"b": 1, "a": "<é>"}'),
        ("{{ [1, {'a': 2}] | tojson(indent=2) }}", '[\n  1,\n  {\n    "a": 2\n  }\n]'),
        ("{{ tools is none and documents is none }}", "True"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ ' ' if not loop.last }}{% endfor %}", "1/3 2/3 3/3"),
        ("{% for i in [1, 2, 3] if i != 2 %}{{ i }}{% else %}none{% endfor %}", "13"),
        ("{% for i in [] %}{% else %}none{% endfor %}", "none"),
        ("{% for k, v in {'a': 1}.items() %}{{ k ~ v }}{% endfor %}", "a1"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "1"),
        ("{{ ' a '.strip() + 'b'.upper() + 'c-d'.split('-')[1] }}", "aBd"), ("{{ 'x' * 3 }}{{ 7 % 4 }}{{ 2 ** 5 }}", "xxx332"),
        ("{{ 'aXb'.replace('X', '-') }}{{ ','.join(['a', 'b']) }}", "a-ba,b"),
        ("{{ messages | map(attribute='role') | join(';') }}", "user"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"), ("{{ 'abc'[::-1] }}{{ 'abc'[0:2] }}", "cbaab"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') }}", "<a>"), ("{{ strftime_now('%Y') | length }}", "4"), ("{{ nothing }}", ""),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}", "a1"), ("{{ ['b', 'a'] | sort | first }}{{ [1, 2] | sum }}", "a3"),
        ("{{ '%s!' % 'a' }}", "a!"),
        ("{{ {'a': ['b', 1.5, none, true]} }}", "{'a': ['b', 1.5, None, True]}"), ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ (1,) }}{{ (1, 2) }}", "(1,)(1, 2)"), ("{{ 'a' if messages[0].name is defined else 'b' }}", "b"),
        ("{% for a in [[1, [2]]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}", "12"),
    ],
)  # fmt: skip
def test_what_templates_use(source: str, text: str) -> None:
    assert render(source) == text


DOUBLING = "{% set ns = namespace(x=START) %}{% for i in range(64) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x | length }}"
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "huge range": "{{ range(10 ** 12) | list }}",
    "loop over a long text": "{% for x in 'a' * 4000000 %}{% endfor %}",
    "long text": "{{ 'a' * 10 ** 9 }}",
    "long list": "{{ [0] * 10 ** 9 }}",
    "huge number": "{{ 10 ** 1000000 }}",
    "number growing": DOUBLING.replace("START", "9").replace("STEP", "ns.x * ns.x"),
    "doubling by +": DOUBLING.replace("START", "'a'").replace("STEP", "ns.x + ns.x"),
    "doubling by ~": DOUBLING.replace("START", "'a'").replace("STEP", "ns.x ~ ns.x"),
    "doubling by list": DOUBLING.replace("START", "['a']").replace("STEP", "ns.x + ns.x"),
    "doubling by join": DOUBLING.replace("START", "'a'").replace("STEP", "[ns.x, ns.x] | join"),
    "doubling by join method": DOUBLING.replace("START", "'a'").replace("STEP", "''.join([ns.x, ns.x])"),
    "doubling by replace": DOUBLING.replace("START", "'a'").replace("STEP", "ns.x | replace('a', 'aa')"),
    "doubling by replace method": DOUBLING.replace("START", "'a'").replace("STEP", "ns.x.replace('a', 'aa')"),
    "doubling by block": DOUBLING.replace("START", "'a'").replace(
        "{% set ns.x = STEP %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"
    ),
    "shared lists printed": DOUBLING.replace("START", "[]").replace("STEP", "[ns.x, ns.x]").replace("| length", ""),
    "shared lists as text": DOUBLING.replace("START", "[]").replace("STEP", "[ns.x, ns.x]").replace("| length", "| string"),
    "shared lists as JSON": DOUBLING.replace("START", "[]").replace("STEP", "[ns.x, ns.x]").replace("| length", "| tojson"),
    "shared lists joined": DOUBLING.replace("START", "[]").replace("STEP", "[ns.x, ns.x]").replace("| length", "~ ''"),
    "macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(64) }}",
    "loop that calls itself": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "width of %": "{{ '%1000000000d' % 1 }}",
    "width of * in %": "{{ '%*d' % (1000000000, 1) }}",
    "format method": "{{ '{:1000000000}'.format(1) }}",
    "ljust": "{{ 'a'.ljust(10 ** 9) }}",
    "zfill": "{{ 'a'.zfill(10 ** 9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "indent of JSON": "{{ [1] | tojson(indent=10 ** 9) }}",
    "class of a text": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a function": "{{ raise_exception.__globals__ }}{{ cycler.__init__.__globals__ }}",
    "globals of a class": "{{ namespace.__init__.__globals__.os.system('x') }}",
    "frame of a generator": "{{ (messages | map('upper')).gi_frame.f_globals.x }}",
    "environment of a macro": "{% macro m() %}{% endmacro %}{{ m._environment.globals.x }}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
    "changing the conversation": "{{ messages.append({'role': 'user'}) }}",
    "changing a message": "{{ messages[0].update({'role': 'system'}) }}",
    "missing parts": "{{ messages[0].nothing.at.all }}",
    "adding a text to a number": "{{ 'a' + 1 }}",
    "calling a text": "{{ 'a'() }}",
    "division by zero": "{{ 1 / 0 }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_soon_and_as_the_callers_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_MAX_SECONDS", 0.2)
    start = time.thread_time()
    with pytest.raises(StatusError) as caught:
        render(HOSTILE[name])
    assert time.thread_time() - start < 1
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}", "{{ x", "{% if %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 5000, "{{ x | nofilter }}",
        "{{ 'x' | center(1000000000) }}", "{{ x | format }}", "{{ 'x' | wordwrap(1) }}", "x" * (MAX_SOURCE_CHARS + 1),
    ],
)  # fmt: skip
def test_sources_that_are_no_templates(source: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate(source, SPECIAL)


def test_a_rendering_does_not_change_the_conversation(tmp_path: Path) -> None:
    message = dict(USER)
    render("{% for m in messages %}{{ m.content }}{% endfor %}", [message])
    assert message == USER
