"""From what came to an admitted request: prompt, room, seed, class, deadline, label (B27, B29, B34, B35)."""

import math
from typing import Any

import pytest
import tokenizers

from services.common.errors import Code, StatusError
from services.gateway.auth import Caller
from services.gateway.conversation import ChatOptions
from services.gateway.latency import BATCH, DEADLINE_SECONDS, REALTIME, STANDARD
from services.gateway.models import ServedModel
from services.gateway.request import Envelope, admit_chat, admit_completion, count_chat_tokens, count_tokens
from services.gateway.text.template import ChatTemplate
from services.text.compiler import Compiler
from services.text.tokenizer import SpecialTokens, Tokenizer, Vocabulary, byte_level_alphabet
from tests.unit.text.vocabularies import sentencepiece

CALLER = Caller("acme", "ann", frozenset({"user"}), 2e9)
CONTEXT = 100
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<go>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return Tokenizer(backend, Vocabulary([bytes([byte]) for byte in range(256)]))


def model(**fields: Any) -> ServedModel:
    defaults: dict[str, Any] = {
        "name": "tiny", "aliases": (), "tokenizer": byte_tokenizer(), "template": ChatTemplate(TEMPLATE, SpecialTokens()), "created": 0,
        "context_len": CONTEXT, "max_model_len": CONTEXT, "vocab_size": 256, "version": "v1", "ready": True,
        "compiler": Compiler(byte_tokenizer(), 256, []),
    }  # fmt: skip
    return ServedModel(**defaults | fields)


def envelope(**fields: Any) -> Envelope:
    return Envelope(**{"caller": CALLER, "model": model()} | fields)


async def refusal(work: Any, code: Code = Code.INVALID_ARGUMENT) -> StatusError:
    with pytest.raises(StatusError) as caught:
        await work
    assert caught.value.code is code
    return caught.value


async def test_a_text() -> None:
    [generation] = await admit_completion(envelope(label="mine"), "hi", {})
    assert generation.org == "acme"
    assert (generation.prompt_text, generation.prompt_token_ids, generation.label) == ("hi", [104, 105], "mine")
    assert generation.latency_class == STANDARD
    assert generation.deadline_seconds == DEADLINE_SECONDS[STANDARD]
    assert generation.sampling.max_tokens == CONTEXT - 2
    assert len(generation.request_id) == 32


async def test_token_ids_are_taken_as_they_are() -> None:
    [generation] = await admit_completion(envelope(), [0, 255], {"max_tokens": 5})
    assert (generation.prompt_token_ids, generation.prompt_text, generation.sampling.max_tokens) == ([0, 255], None, 5)


async def test_each_prompt_has_its_own_room_id_and_seed() -> None:
    first, second = await admit_completion(envelope(), ["a", "abc"], {})
    assert (first.sampling.max_tokens, second.sampling.max_tokens) == (CONTEXT - 1, CONTEXT - 3)
    assert first.request_id != second.request_id
    assert first.sampling.seed != second.sampling.seed
    assert all(0 <= generation.sampling.seed < 2**53 for generation in (first, second))


@pytest.mark.parametrize("seed", [0, 5, -5])
async def test_a_given_seed_is_everyones(seed: int) -> None:
    assert [generation.sampling.seed for generation in await admit_completion(envelope(), ["a", "b"], {"seed": seed})] == [seed, seed]


@pytest.mark.parametrize(("length", "room"), [(CONTEXT - 1, 1), (CONTEXT, 0), (CONTEXT + 1, 0), (10 * CONTEXT, 0)])
@pytest.mark.parametrize("as_ids", [True, False])
async def test_b29_around_the_context_length(length: int, room: int, as_ids: bool) -> None:
    prompt: object = [1] * length if as_ids else "x" * length
    if room:
        [generation] = await admit_completion(envelope(), prompt, {})
        assert generation.sampling.max_tokens == room
    else:
        error = await refusal(admit_completion(envelope(), prompt, {}))
        assert error.violations[0].field == "prompt"
        assert f"{length} tokens" in error.message
        assert str(CONTEXT) in error.message


async def test_a_long_prompt_in_a_list_is_named() -> None:
    error = await refusal(admit_completion(envelope(names={"prompt": "input"}), ["x", "x" * CONTEXT], {}))
    assert error.violations[0].field == "input[1]"


async def test_echo_allows_no_output() -> None:
    [generation] = await admit_completion(envelope(echo=True), "x" * CONTEXT, {"max_tokens": 0})
    assert (generation.echo, generation.sampling.max_tokens) == (True, 0)
    await refusal(admit_completion(envelope(), "x", {"max_tokens": 0}))


async def test_sampling_is_refused_before_the_prompt_is_tokenised() -> None:
    class Untouched(Tokenizer):
        def __init__(self) -> None: ...
        def encode(self, text: str, *, add_special: bool = True) -> list[int]:
            raise AssertionError

    asked = envelope(model=model(tokenizer=Untouched()), names={"n": "N"})
    assert (await refusal(admit_completion(asked, "x", {"n": 17}))).violations[0].field == "N"
    assert (await refusal(admit_completion(asked, "x" * (1 << 20) + "x", {}))).violations[0].field == "prompt"
    assert (await refusal(admit_completion(asked, "", {}))).violations[0].field == "prompt"


async def test_a_text_that_comes_to_no_tokens_is_refused() -> None:
    class Empty(Tokenizer):
        def __init__(self) -> None: ...
        def encode(self, text: str, *, add_special: bool = True) -> list[int]:
            return []

    assert "no tokens" in (await refusal(admit_completion(envelope(model=model(tokenizer=Empty())), "x", {}))).message


async def test_large_texts_are_tokenised_as_well() -> None:
    big = model(max_model_len=1 << 20)
    [generation] = await admit_completion(envelope(model=big), "x" * 100_000, {})
    assert len(generation.prompt_token_ids) == 100_000


async def test_chat() -> None:
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}]
    generation = await admit_chat(envelope(), messages, {"temperature": 0})
    assert generation.prompt_text == "<system>s<user>u<go>"
    assert bytes(generation.prompt_token_ids).decode() == generation.prompt_text


async def test_a_rendered_prompt_gets_no_second_bos() -> None:
    spm = Tokenizer(sentencepiece(), Vocabulary([b""] * 500))
    with_bos = model(tokenizer=spm, template=ChatTemplate("{{ bos_token }}x", SpecialTokens(bos="<s>")))
    generation = await admit_chat(envelope(model=with_bos), [{"role": "user", "content": "x"}], {})
    assert generation.prompt_token_ids.count(1) == 1
    [completion] = await admit_completion(envelope(model=with_bos), "x", {})
    assert completion.prompt_token_ids.count(1) == 1


async def test_b34_the_templates_refusal_is_the_callers_error() -> None:
    error = await refusal(admit_chat(envelope(), [{"role": "tool", "content": "x"}], {}))
    assert "no tools here" in error.message
    assert error.violations[0].field == "messages"


async def test_a_conversation_that_is_too_long() -> None:
    error = await refusal(admit_chat(envelope(), [{"role": "user", "content": "x" * 200}], {}))
    assert error.violations[0].field == "messages"
    assert "shorten it by" in error.message


async def test_a_model_without_template_cannot_chat() -> None:
    error = await refusal(admit_chat(envelope(model=model(template=None)), [{"role": "user", "content": "x"}], {}))
    assert "no chat template" in error.message


async def test_a_model_that_no_worker_has_shown() -> None:
    error = await refusal(admit_completion(envelope(model=model(version="")), "x", {}), Code.UNAVAILABLE)
    assert error.retry_after_seconds is not None


@pytest.mark.parametrize("label", ["x" * (1 << 20), "a\nb", 5])
async def test_b35_labels(label: object) -> None:
    error = await refusal(admit_completion(envelope(label=label, names={"label": "x-request-id"}), "x", {}))
    assert error.violations[0].field == "x-request-id"


async def test_b35_one_label_on_two_requests_gives_two_ids() -> None:
    [first], [second] = [await admit_completion(envelope(label="same"), "x", {}) for _ in range(2)]
    assert first.label == second.label == "same"
    assert first.request_id != second.request_id


@pytest.mark.parametrize("given", [0, STANDARD, BATCH, REALTIME])
async def test_the_class_decides_on_the_deadline_where_none_is_given(given: Any) -> None:
    [generation] = await admit_completion(envelope(latency_class=given), "x", {})
    assert generation.latency_class == (given or STANDARD)
    assert generation.deadline_seconds == DEADLINE_SECONDS[generation.latency_class]
    [generation] = await admit_completion(envelope(latency_class=given, deadlines=dict.fromkeys(DEADLINE_SECONDS, 7.0)), "x", {})
    assert generation.deadline_seconds == 7.0


async def test_a_class_from_the_future_is_refused() -> None:
    assert (await refusal(admit_completion(envelope(latency_class=9), "x", {}))).violations[0].field == "latency_class"


@pytest.mark.parametrize(("given", "seconds"), [(0.5, 0.5), (30, 30), (math.inf, 7 * 86400), (1e300, 7 * 86400)])
async def test_deadlines(given: float, seconds: float) -> None:
    [generation] = await admit_completion(envelope(deadline_seconds=given), "x", {})
    assert generation.deadline_seconds == seconds


@pytest.mark.parametrize("given", [0, -0.001, -math.inf, math.nan])
async def test_f17_a_deadline_that_has_passed_starts_no_work(given: float) -> None:
    await refusal(admit_completion(envelope(deadline_seconds=given), "x", {}), Code.DEADLINE_EXCEEDED)


async def test_counting() -> None:
    assert await count_tokens(model(), "hi") == [104, 105]
    assert await count_tokens(model(), "") == []
    assert len(await count_tokens(model(), "x" * 5000)) == 5000, "counting is for texts that don't fit, too"
    messages = [{"role": "user", "content": "u"}]
    assert bytes(await count_chat_tokens(model(), messages, ChatOptions())).decode() == "<user>u<go>"
    for text in (None, 5, ["x"], "x" * (1 << 20) + "x"):
        assert (await refusal(count_tokens(model(), text, name="prompt"))).violations[0].field == "prompt"
    assert (await refusal(count_chat_tokens(model(), [], ChatOptions()))).violations[0].field == "messages"


async def test_b33_the_log_probabilities_of_prompts_are_bounded_over_prompts_and_choices() -> None:
    """624 MiB of them once held every stream of a gateway for two minutes."""
    fields = {"prompt_logprobs": 20, "max_tokens": 0}
    wide = envelope(model=model(max_model_len=16_384), echo=True)
    assert len(await admit_completion(wide, [5] * 8000, fields)) == 1
    error = await refusal(admit_completion(wide, [[5] * 8000] * 2, fields))
    assert error.violations[0].field == "prompt"
    assert "336000" in error.message
    assert "200000" in error.message
    await refusal(admit_completion(wide, [5] * 8000, fields | {"n": 2}))
