"""What workers are told of a request, beside its tokens."""

import hashlib
import hmac
import json

from forebay.v1 import types_pb2
from services.gateway.validator import Sampling
from services.text.grammar import Grammar

_CACHE_SALT_TAG = b"forebay prefix cache salt v1"


def cache_salt(org: str) -> bytes:
    """Keys the prefix cache, 32 bytes: equal on every gateway, different for every org."""
    return hmac.digest(_CACHE_SALT_TAG, org.encode(), hashlib.sha256)


def engine_sampling(sampling: Sampling) -> types_pb2.SamplingParams:
    """Every default filled in; stop strings stay here."""
    return types_pb2.SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        n=sampling.n,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        speculation=sampling.speculation,
        grammar=None if sampling.grammar is None else _grammar(sampling.grammar),
    )


def _grammar(grammar: Grammar) -> types_pb2.Grammar:
    match grammar.kind:
        case "json_object":
            return types_pb2.Grammar(json_object=True)
        case "choice":
            return types_pb2.Grammar(choice=types_pb2.Choices(choices=json.loads(grammar.text)))
        case "json_schema":
            return types_pb2.Grammar(json_schema=grammar.text)
        case "regex":
            return types_pb2.Grammar(regex=grammar.text)
        case "lark":
            return types_pb2.Grammar(lark=grammar.text)
