"""A policy file that is read again when it has changed. A change that can't be used leaves the last good policy, and is told."""

import time
from collections.abc import Callable
from pathlib import Path

from services.common import log
from services.policy.document import PolicyError
from services.policy.policy import Policy, load

LOG = log.get(__name__)
CHECK_SECONDS = 1.0


class PolicyFile:
    """The current policy; without a path, the one that limits nobody."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises PolicyError or OSError where the file can't be used now."""
        self._path = path
        self._clock = clock
        self._stamp = self._seen = _stamp(path) if path else None
        self._next_look = clock() + CHECK_SECONDS
        self._policy = load(path) if path else Policy()
        self.num_failures = 0
        """Changes that couldn't be used."""
        self.problem = ""
        """Why the file as it is now can't be used; empty if it is."""

    @property
    def policy(self) -> Policy:
        """The last good one."""
        self.look()
        return self._policy

    def look(self) -> None:
        """Reads the file again if it has changed, looking at most once a second, and has not since the last look."""
        if self._path is not None and self._clock() >= self._next_look:
            self._next_look = self._clock() + CHECK_SECONDS
            self._read(self._path)

    def _read(self, path: Path) -> None:
        try:
            stamp = _stamp(path)
            if stamp == self._stamp:
                return
            if stamp != self._seen:  # It may be half written: the half may be a policy too.
                self._seen = stamp
                return
            self._stamp = stamp
            policy = load(path)
            if _stamp(path) != stamp:  # Writing has begun since.
                return
            if policy == Policy() != self._policy:  # a file that is just being written, or on a full disk
                raise PolicyError(1, "it promises nothing, and did before; if you mean that, restart the services", str(path))
            self._policy = policy
        except OSError as error:
            self._stamp = self._seen = None  # Or it wouldn't be seen to come back as it was.
            self._fail(str(error))
        except PolicyError as error:
            self._fail(str(error))
        else:
            LOG.info("policy_read", file=str(path), orgs=len(self._policy.orgs), models=len(self._policy.models))
            self.problem = ""

    def _fail(self, problem: str) -> None:
        if problem != self.problem:
            self.num_failures += 1
            LOG.error("policy_refused", problem=problem)
        self.problem = problem


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino
