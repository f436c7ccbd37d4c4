"""The encoder's engine: every input's vector once, cut and normalised as asked for, and a request's end."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.worker.engine.encoder import EncodeOutput, Encoder, EncodeRequest
from services.worker.engine.encoder_file import load_encoder, read_encoder
from services.worker.engine.request import FinishReason, RequestTooLarge
from tests.tiny_encoders import MAX_LEN, save_encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    save_encoder(folder)
    return folder


def drain(encoder: Encoder) -> list[EncodeOutput]:
    outputs = []
    while encoder.has_work:
        outputs += encoder.step(0.0)
        encoder.check_integrity()
    return outputs


def vectors_of(outputs: Sequence[EncodeOutput], request_id: str) -> Tensor:
    """[num_inputs, dimensions], in the inputs' order."""
    rows = {i: row for output in outputs if output.request_id == request_id for i, row in zip(output.indexes, output.vectors, strict=True)}
    return torch.stack([rows[index] for index in range(len(rows))])


def test_vectors_are_the_models_whatever_the_steps(folder: Path) -> None:
    model, _ = load_encoder(folder)
    inputs = [[2, 5 + length % 30, 3] * (length % 9 + 1) for length in range(20)]
    encoder = Encoder.from_path(folder, max_step_tokens=32)
    encoder.add(EncodeRequest("a", inputs))
    encoder.add(EncodeRequest("b", inputs[:3]))
    outputs = drain(encoder)
    torch.testing.assert_close(vectors_of(outputs, "a"), model(inputs), rtol=0, atol=1e-5)
    torch.testing.assert_close(vectors_of(outputs, "b"), model(inputs[:3]), rtol=0, atol=1e-5)


def test_a_request_ends_once_with_its_last_vectors(folder: Path) -> None:
    encoder = Encoder.from_path(folder, max_step_tokens=4)
    encoder.add(EncodeRequest("a", [[1, 2], [3, 4], [5, 6]]))
    outputs = drain(encoder)
    assert [(output.indexes, output.num_tokens, output.finish_reason) for output in outputs] == [
        ([0, 1], 4, None),
        ([2], 2, FinishReason.STOP),
    ]


def test_dimensions_cut_and_normalise_again(folder: Path) -> None:
    encoder = Encoder.from_path(folder)
    encoder.add(EncodeRequest("all", [[7, 8]]))
    encoder.add(EncodeRequest("cut", [[7, 8]], dimensions=5))
    outputs = drain(encoder)
    whole, cut = vectors_of(outputs, "all")[0], vectors_of(outputs, "cut")[0]
    torch.testing.assert_close(cut, whole[:5] / whole[:5].norm(), rtol=0, atol=1e-5)


def test_an_aborted_request_says_nothing_more(folder: Path) -> None:
    encoder = Encoder.from_path(folder, max_step_tokens=2)
    encoder.add(EncodeRequest("a", [[1, 2], [3, 4]]))
    encoder.step(0.0)
    encoder.abort("a")
    assert not encoder.has_work
    assert encoder.step(0.0) == []


def test_an_input_that_is_too_long_is_refused(folder: Path) -> None:
    with pytest.raises(RequestTooLarge, match=f"takes at most {MAX_LEN}"):
        Encoder.from_path(folder).add(EncodeRequest("a", [[1] * (MAX_LEN + 1)]))


class Broken:
    """Gives a vector that is no number for inputs that begin with 9."""

    def __init__(self, folder: Path) -> None:
        self.config = read_encoder(folder)

    def __call__(self, inputs: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([[torch.nan if ids[0] == 9 else 1.0] * self.config.hidden_size for ids in inputs])


def test_a_vector_that_is_no_number_ends_its_request_alone(folder: Path) -> None:
    encoder = Encoder(Broken(folder), max_step_tokens=4)
    encoder.add(EncodeRequest("bad", [[1], [9], [1, 1], [1, 1]]))
    encoder.add(EncodeRequest("good", [[1], [2]]))
    outputs = drain(encoder)
    ends = {output.request_id: output for output in outputs if output.finish_reason is not None}
    assert ends["bad"].finish_reason is FinishReason.ERROR
    assert ends["bad"].error == "the vector of inputs[1] isn't finite"
    assert ends["good"].finish_reason is FinishReason.STOP
    assert [output.request_id for output in outputs].count("bad") == 1


def test_stats_count_what_was_done(folder: Path) -> None:
    encoder = Encoder.from_path(folder, max_step_tokens=4)
    encoder.add(EncodeRequest("a", [[1, 2], [3, 4], [5, 6]]))
    assert (encoder.stats().num_waiting, encoder.stats().num_running) == (1, 0)
    encoder.step(0.0)
    assert encoder.progress() == [("a", 4, 0)]
    assert (encoder.stats().num_waiting, encoder.stats().num_running) == (0, 1)
    drain(encoder)
    stats = encoder.stats()
    assert (stats.num_inputs, stats.num_computed_tokens, stats.num_steps, stats.num_running) == (3, 6, 2, 0)


def test_the_longest_step_is_foretold_from_slow_ones(folder: Path) -> None:
    times = iter([0.0, 1.0, 5.0, 5.5])
    encoder = Encoder(load_encoder(folder)[0], max_step_tokens=100, clock=lambda: next(times))
    assert encoder.full_step_seconds() == 0
    for _ in range(2):
        encoder.add(EncodeRequest("a", [[1, 2]]))
        encoder.step(0.0)
    assert encoder.full_step_seconds() == pytest.approx(0.95 * 100 / 2)
