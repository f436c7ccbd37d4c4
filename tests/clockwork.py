"""A stand-in for a decoder whose weights move."""

import threading

import torch


class Clockwork:
    """Implements Movable: its weights come when `let_come` is set."""

    def __init__(self, num_bytes: int = 4096) -> None:
        self.weights = torch.zeros(num_bytes, dtype=torch.uint8)
        self.place: torch.Tensor | None = self.weights
        self.let_come = threading.Event()

    def move(self, place: torch.Tensor | None) -> None:
        self.place = place

    def bring(self) -> None:
        self.let_come.wait()
