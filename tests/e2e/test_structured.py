"""Structured output with the real model: what the SDK parses, what a grammar allows, and a move in the middle of it."""

import json

from pydantic import BaseModel, Field

from forebay.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.e2e.mesh import Mesh

QUESTION = [{"role": "user", "content": "Describe the city of Paris as JSON: name, country, population in millions."}]


class City(BaseModel):
    name: str = Field(max_length=40)
    country: str = Field(max_length=40)
    population: int = Field(ge=0, le=1000)


def test_the_sdk_parses_what_the_model_says_under_a_schema(mesh: Mesh) -> None:
    answer = mesh.openai().chat.completions.parse(model=mesh.model, messages=QUESTION, response_format=City, temperature=0, max_tokens=120)
    city = answer.choices[0].message.parsed
    assert isinstance(city, City)
    assert answer.choices[0].finish_reason == "stop"


def test_choices_of_both_faces_follow_the_grammar_by_themselves(mesh: Mesh) -> None:
    answer = mesh.openai().completions.create(
        model=mesh.model, prompt="A date:", n=3, temperature=1.5, max_tokens=40, extra_body={"structured_outputs": {"regex": r"\d{4}-\d\d"}}
    )
    assert all(choice.finish_reason == "stop" and len(choice.text) == 7 and choice.text[4] == "-" for choice in answer.choices)
    request = inference_pb2.GenerateRequest(
        text="Is water wet? Answer:",
        sampling=types_pb2.SamplingParams(
            temperature=1, max_tokens=40, min_tokens=20, grammar=types_pb2.Grammar(choice=types_pb2.Choices(choices=[" yes", " no"]))
        ),
    )
    with mesh.channel() as channel:
        events = list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, metadata=mesh.metadata, timeout=60))
    assert "".join(event.delta.text for event in events) in (" yes", " no")
    assert events[-1].finished.reasons == [types_pb2.FINISH_REASON_STOP]


def test_any_json_object_is_json(mesh: Mesh) -> None:
    answer = mesh.openai().chat.completions.create(
        model=mesh.model, messages=QUESTION, response_format={"type": "json_object"}, temperature=0, max_tokens=200
    )
    (choice,) = answer.choices
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)
    else:
        assert (choice.message.content or "").startswith("{")


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def test_a_required_tool_is_called_whole_and_streamed(mesh: Mesh) -> None:
    asked = {
        "model": mesh.model,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 100,
    }
    (choice,) = mesh.openai().chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, set(arguments), arguments["unit"] in "CF") == ("get_weather", {"city", "unit"}, True)
    with mesh.openai().chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or ()
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    result = [{"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}]
    conversation = [*asked["messages"], choice.message.model_dump(exclude_none=True), *result]
    answer = mesh.openai().chat.completions.create(
        model=mesh.model, messages=conversation, tools=[WEATHER], tool_choice="none", temperature=0, max_tokens=20
    )
    assert answer.choices[0].message.content


def test_beside_a_format_the_model_answers_under_it_or_calls_and_its_prompt_was_counted(mesh: Mesh) -> None:
    sdk = mesh.openai()
    shape = {"tools": [WEATHER], "response_format": {"type": "json_object"}}
    for text in ("What is the weather in Paris?", "Describe Paris as JSON."):
        asked = {"model": mesh.model, "messages": [{"role": "user", "content": text}], **shape}
        answer = sdk.chat.completions.create(**asked, temperature=0, max_tokens=150)
        (choice,) = answer.choices
        for call in choice.message.tool_calls or ():
            assert call.type == "function"
            assert call.function.name == "get_weather"
        if not choice.message.tool_calls:
            assert (choice.message.content or "").startswith("{")
        counted = sdk.with_options(base_url=str(sdk.base_url).removesuffix("v1/")).post("/tokenize", body=asked, cast_to=dict)
        assert answer.usage is not None
        assert counted["count"] == answer.usage.prompt_tokens
