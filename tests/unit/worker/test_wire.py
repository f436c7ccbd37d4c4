"""Every bound of a leased request is checked again at the worker."""

import math
from dataclasses import replace

import pytest

from forebay.v1 import types_pb2, worker_pb2
from services.common.errors import Code, StatusError
from services.worker.engine.request import TokenOutput
from services.worker.wire import Served, append, target, to_engine

SERVED = Served("toy@fp32", "v1", "toy", vocab_size=100, block_size=4, num_blocks=8, max_model_len=32)


def good() -> worker_pb2.WorkerServiceGenerateRequest:
    return worker_pb2.WorkerServiceGenerateRequest(
        request_id="r",
        epoch=1,
        incarnation="i",
        model="toy@fp32",
        model_version="v1",
        latency_class=types_pb2.LATENCY_CLASS_BATCH,
        cache_salt=b"s" * 32,
        prompt_token_ids=[0, 99],
        sampling=types_pb2.SamplingParams(max_tokens=4, seed=-5),
    )


def test_a_good_request_comes_through_with_defaults() -> None:
    request = to_engine(good(), SERVED)
    assert (request.request_id, request.prompt_token_ids, request.n, request.latency_class) == ("r#1", [0, 99], 1, 3)
    assert (request.sampling.max_tokens, request.sampling.seed, request.sampling.top_p) == (4, -5, 1.0)
    assert request.sampling.logprobs is None
    assert request.sampling.speculation


def test_everything_given_comes_through() -> None:
    message = good()
    message.sampling.MergeFrom(
        types_pb2.SamplingParams(
            min_tokens=2, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, presence_penalty=-1, frequency_penalty=1.5,
            repetition_penalty=1.25, logit_bias={5: -100}, stop_token_ids=[6], ignore_eos=True, n=3, logprobs=0, prompt_logprobs=2,
            speculation=False,
        )
    )  # fmt: skip
    message.delivered.add(ids=[1, 2, 3, 4])
    message.delivered.add(ids=[1])
    message.finished_choices.append(0)
    message.ttft_target_seconds, message.tpot_target_seconds, message.waited_seconds = 0.5, 0.05, 0.25
    request = to_engine(message, SERVED)
    assert (request.ttft_target_seconds, request.tpot_target_seconds, request.waited_seconds) == (0.5, 0.05, 0.25)
    sampling = request.sampling
    assert (sampling.min_tokens, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (2, 0.5, 0.25, 7, 0.125)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-1, 1.5, 1.25)
    assert (sampling.logit_bias, sampling.stop_token_ids, sampling.ignore_eos) == ({5: -100}, (6,), True)
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.speculation) == (0, 2, False)
    assert (request.n, request.delivered, request.finished_choices) == (3, ((1, 2, 3, 4), (1,)), frozenset({0}))


BAD_SAMPLING: list[tuple[str, dict[str, object]]] = [
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 31}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 10**9}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 101}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.5}),
    ("top_p", {"top_p": math.nan}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": 1.5}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": -2.5}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("repetition_penalty", {"repetition_penalty": math.nan}),
    ("logit_bias", {"logit_bias": {100: 1.0}}),
    ("logit_bias", {"logit_bias": {1: 101.0}}),
    ("logit_bias", {"logit_bias": {1: math.nan}}),
    ("stop_token_ids", {"stop_token_ids": [100]}),
    ("stop_token_ids", {"stop_token_ids": [1] * 17}),
    ("n", {"n": 0}),
    ("n", {"n": 17}),
    ("logprobs", {"logprobs": 21}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
]


@pytest.mark.parametrize(("field", "values"), BAD_SAMPLING)
def test_a_sampling_value_out_of_range_is_blamed(field: str, values: dict[str, object]) -> None:
    message = good()
    message.sampling.MergeFrom(types_pb2.SamplingParams(**values))
    blamed(message, f"sampling.{field}")


BAD_FIELDS: list[tuple[str, dict[str, object]]] = [
    ("request_id", {"request_id": "x" * 129}),
    ("epoch", {"epoch": -1}),
    ("latency_class", {"latency_class": 9}),
    ("cache_salt", {"cache_salt": b"short"}),
    ("prompt_token_ids", {"prompt_token_ids": [100]}),
    ("prompt_token_ids", {"prompt_token_ids": [-1]}),
    ("prompt_token_ids", {"prompt_token_ids": [1] * 40}),
    ("finished_choices", {"finished_choices": [1]}),
    ("finished_choices", {"finished_choices": [0]}),
    ("delivered", {"delivered": [{"ids": [1]}, {"ids": [1]}]}),
    ("delivered[0]", {"delivered": [{"ids": [1, 2, 3, 4]}]}),
    ("delivered[0]", {"delivered": [{"ids": [100]}]}),
    ("ttft_target_seconds", {"ttft_target_seconds": -0.1}),
    ("tpot_target_seconds", {"tpot_target_seconds": math.inf}),
    ("waited_seconds", {"waited_seconds": math.nan}),
]


@pytest.mark.parametrize(("field", "values"), BAD_FIELDS)
def test_a_field_out_of_range_is_blamed(field: str, values: dict[str, object]) -> None:
    message = good()
    message.MergeFrom(worker_pb2.WorkerServiceGenerateRequest(**values))
    blamed(message, field)


@pytest.mark.parametrize("field", ["max_tokens", "seed"])
def test_what_the_gateway_must_fill_in_is_missed(field: str) -> None:
    message = good()
    message.sampling.ClearField(field)
    blamed(message, f"sampling.{field}")


def test_an_empty_prompt_is_blamed() -> None:
    message = good()
    message.ClearField("prompt_token_ids")
    blamed(message, "prompt_token_ids")


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("incarnation", "j", Code.FAILED_PRECONDITION),
        ("model", "third@fp32", Code.NOT_FOUND),
        ("model_version", "v2", Code.FAILED_PRECONDITION),
    ],
)
def test_a_request_for_another_worker_is_refused(field: str, value: str, code: Code) -> None:
    message = good()
    models = {"other@fp32": replace(SERVED, model="other@fp32"), SERVED.model: SERVED}
    assert target(message, models, "i") is SERVED
    setattr(message, field, value)
    with pytest.raises(StatusError) as caught:
        target(message, models, "i")
    assert caught.value.code is code


def blamed(message: worker_pb2.WorkerServiceGenerateRequest, field: str) -> None:
    with pytest.raises(StatusError) as caught:
        to_engine(message, SERVED)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert [violation.field for violation in caught.value.violations] == [field]


def test_verdicts_stay_beside_their_tokens_where_outputs_are_joined() -> None:
    delta = worker_pb2.TokenDelta()
    for tokens, num_judged, num_accepted in (([1], 0, 0), ([2, 3, 4], 2, 2), ([5, 6], 2, 1), ([7], 0, 0), ([8], 1, 0), ([9], 0, 0)):
        append(delta, TokenOutput("r", 0, 0, list(tokens), num_judged=num_judged, num_accepted=num_accepted))
    assert list(delta.token_ids) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert list(delta.verdicts) == [0, 2, 2, 0, 2, 1, 0, 1]
