"""Logs tell where something failed, and never what the failing code held in its hands."""

import json
import subprocess
import sys

import pytest

# Nothing that is looked for stands here as a whole: a traceback may show lines of the program.
_PROGRAM = """
import logging
from services.common import log
log.setup("worker", json={as_json})
def answer(prompt, authorization):
    raise ValueError("the engine " + "has failed")
for logger in (log.get("ours"), logging.getLogger("of.a.library")):
    try:
        answer("my secret " + "prompt", "Bearer abc" + ".def")
    except ValueError:
        logger.exception("request failed")
"""


@pytest.mark.parametrize("as_json", [True, False])
def test_a_traceback_shows_no_variables(as_json: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _PROGRAM.format(as_json=as_json)], capture_output=True, text=True, check=True
    )
    for word in ("secret prompt", "abc.def"):
        assert word not in done.stderr
    assert done.stderr.count("the engine has failed") == 2
    assert done.stderr.count("request failed") == 2
    if as_json:
        for line in done.stderr.splitlines():
            (exception,) = json.loads(line)["exception"]
            assert exception["frames"][-1]["name"] == "answer"
    else:
        assert done.stderr.count(", in answer") == 2
