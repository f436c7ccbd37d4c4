"""Where a choice ends, what is refused, and by which words: lengths, bad values, stop tokens."""

import pytest

from services.worker.engine.config import EngineConfig
from services.worker.engine.request import (
    EngineRequest,
    FinishReason,
    InvalidRequest,
    RequestTooLarge,
    SamplingParams,
)
from tests.engine_harness import BIG, drain, endings, endings_of, greedy, tokens_of
from tests.fake_runner import EOS, VOCAB_SIZE, fake_engine


@pytest.mark.parametrize("max_step_tokens", [1, 7, 512])
def test_b03_ends_at_exactly_the_room_left(max_step_tokens: int) -> None:
    """32 at once, three tokens short of the context."""
    config = EngineConfig(num_blocks=32 * 8, block_size=4, max_step_tokens=max_step_tokens, max_sequences=32, max_model_len=30)
    requests = [EngineRequest(f"r{i}", [i] * 27, greedy(max_tokens)) for i, max_tokens in enumerate([None, 10**9] * 16)]
    for tokens, reason in endings_of(requests, config).values():
        assert (len(tokens), reason) == (3, FinishReason.LENGTH)


def test_b29_prompts_at_the_edge_of_the_context() -> None:
    engine = fake_engine(EngineConfig(num_blocks=64, block_size=4, max_model_len=32))
    engine.add(EngineRequest("one left", [1] * 31, greedy(None)))
    for length in (32, 33, 320):
        with pytest.raises(RequestTooLarge, match="context of 32"):
            engine.add(EngineRequest(f"{length}", [1] * length, greedy(None)))
    engine.add(EngineRequest("score", [1] * 32, SamplingParams(max_tokens=0, prompt_logprobs=0)))
    whole = endings(drain(engine))
    assert len(whole["one left", 0][0]) == 1
    assert whole["score", 0] == ([], FinishReason.LENGTH)


def test_b23_what_can_never_fit_is_refused_and_holds_nobody_up() -> None:
    engine = fake_engine(EngineConfig(num_blocks=64, block_size=4, max_model_len=4096))
    with pytest.raises(RequestTooLarge, match=r"need 80 blocks of 4; there are 64"):
        engine.add(EngineRequest("big", [1] * 300, greedy(21)))
    for index in range(20):
        engine.add(EngineRequest(f"r{index}", [index] * 4, greedy(4)))
    assert len(drain(engine)) == 20


def test_the_largest_that_fits_does() -> None:
    """The last token's keys and values are never needed: 64 blocks of 4 carry 257 tokens."""
    config = EngineConfig(num_blocks=64, block_size=4, max_model_len=4096)
    ((tokens, _),) = endings_of([EngineRequest("r", [1] * 7, greedy(250))], config).values()
    assert len(tokens) == 250


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),  # B27
        ({"prompt_token_ids": [VOCAB_SIZE]}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"n": 0}, "n is 0"),
        ({"n": 1, "delivered": ((1,), (2,))}, "delivered has 2"),
        ({"delivered": ((VOCAB_SIZE,),)}, "delivered"),
        ({"sampling": SamplingParams(max_tokens=-1)}, "max_tokens is -1"),  # B28
        ({"sampling": SamplingParams(max_tokens=3, min_tokens=4)}, "min_tokens is 4"),
        ({"sampling": SamplingParams(logit_bias={VOCAB_SIZE: 1.0})}, "logit_bias"),  # B30
        ({"sampling": SamplingParams(logit_bias={-1: 1.0})}, "logit_bias"),
        ({"sampling": SamplingParams(logit_bias={1: float("nan")})}, r"logit_bias\[1\] is nan"),
        ({"sampling": SamplingParams(stop_token_ids=(2**31,))}, "stop_token_ids"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature is nan"),  # B31
        ({"sampling": SamplingParams(temperature=float("inf"))}, "temperature is inf"),
        ({"sampling": SamplingParams(temperature=-1)}, "temperature is -1"),
        ({"sampling": SamplingParams(top_p=1.0000001)}, "top_p"),  # B32
        ({"sampling": SamplingParams(top_k=-2)}, "top_k is -2"),
        ({"sampling": SamplingParams(repetition_penalty=0)}, "repetition_penalty is 0"),
    ],
)
def test_bad_values_are_refused_by_name_and_a_good_request_works_on(fields: dict[str, object], words: str) -> None:
    engine = fake_engine(BIG)
    with pytest.raises(InvalidRequest, match=words):
        engine.add(EngineRequest(**{"request_id": "bad", "prompt_token_ids": [1], **fields}))  # type: ignore[arg-type]
    assert not engine.has_work
    engine.add(EngineRequest("good", [1], greedy(2)))
    assert len(tokens_of(drain(engine))["good", 0]) == 2


def test_b42h_huge_min_tokens_ends_at_the_room_left() -> None:
    config = EngineConfig(num_blocks=16, block_size=4, max_model_len=32)
    request = EngineRequest("r", [1], SamplingParams(max_tokens=None, min_tokens=10**9, temperature=0))
    ((tokens, reason),) = endings_of([request], config).values()
    assert (len(tokens), reason) == (31, FinishReason.LENGTH)
    assert EOS not in tokens


def test_a_live_id_is_refused_and_an_ended_one_is_not() -> None:
    engine = fake_engine(BIG)
    engine.add(EngineRequest("r", [1], greedy(1)))
    with pytest.raises(InvalidRequest, match="live"):
        engine.add(EngineRequest("r", [1], greedy(1)))
    drain(engine)
    engine.add(EngineRequest("r", [1], greedy(1)))
    drain(engine)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_end_and_stop_tokens_end_a_choice_and_come_with_it(ignore_eos: bool) -> None:
    stops = tuple(range(0, VOCAB_SIZE, 10))
    sampling = SamplingParams(max_tokens=200, temperature=0, ignore_eos=ignore_eos, stop_token_ids=stops)
    ((tokens, reason),) = endings_of([EngineRequest("r", [5], sampling)]).values()
    assert reason is FinishReason.STOP
    assert tokens[-1] in stops or (tokens[-1] == EOS and not ignore_eos)
    assert not set(tokens[:-1]) & set(stops)


@pytest.mark.parametrize("prompt", range(10))
def test_min_tokens_holds_the_end_back(prompt: int) -> None:
    stops = tuple(range(VOCAB_SIZE - 50))
    sampling = SamplingParams(max_tokens=200, min_tokens=6, temperature=0, stop_token_ids=stops)
    ((tokens, reason),) = endings_of([EngineRequest("r", [prompt], sampling)]).values()
    assert all(token not in stops and token != EOS for token in tokens[:6])
    assert reason is FinishReason.STOP
    assert tokens[-1] in stops
