"""The source gate passes the tree and is red on every seeded danger."""

from pathlib import Path

import pytest

from tools import source_gate

ROOT = Path(__file__).parents[3]
SERVICE = Path("services/gateway/some.py")
ENGINE = Path("services/worker/engine/some.py")


def test_the_services_are_clean(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert source_gate.main([]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import numpy, marshal as m",
        "from dill import loads",
        "def f():\n    import cloudpickle",
        "eval('1')",
        "run = exec",
        "from builtins import eval",
        "__import__('pickle')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import torch as t\nread = t.load",
        "from torch import load",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import jinja2\njinja2.Environment()",
        "from jinja2 import Template",
        "from jinja2.nativetypes import NativeEnvironment as E",
        "import os\nos.system('ls')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import yaml\nyaml.load('x')",
    ],
)
def test_a_seeded_danger_is_found(source: str) -> None:
    (finding,) = source_gate.check(SERVICE, source)
    assert finding.path == SERVICE
    assert source.splitlines()[finding.line - 1].strip()


@pytest.mark.parametrize(
    "source",
    [
        "from jinja2.sandbox import ImmutableSandboxedEnvironment\nImmutableSandboxedEnvironment()",
        "model.eval()",
        "import re\nre.compile('x')",
        "x = 'pickle.load eval('",
        "import json\njson.load(open('x'))",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
    ],
)
def test_what_only_looks_like_one_passes(source: str) -> None:
    assert source_gate.check(SERVICE, source) == []


@pytest.mark.parametrize("module", ["grpc", "redis", "asyncio", "pydantic", "tokenizers", "services.common.log", "forebay.v1", "gguf"])
def test_the_engine_may_not_import(module: str) -> None:
    (finding,) = source_gate.check(ENGINE, f"import {module}")
    assert module in finding.what


@pytest.mark.parametrize("module", ["torch.nn.functional", "numpy", "hashlib", "services.worker.engine.batch"])
def test_the_engine_may_import(module: str) -> None:
    assert source_gate.check(ENGINE, f"import {module}") == []


def test_the_loader_may_read_model_formats() -> None:
    assert source_gate.check(ENGINE.with_name("loader.py"), "import gguf, safetensors.torch") == []
