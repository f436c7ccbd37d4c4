"""Idempotency keys of requests: what each stands for, and for how long. Knows keys and requests by hashes alone."""

from dataclasses import dataclass

from services.common.errors import Code, StatusError
from services.scheduler import keys
from services.scheduler.store import Call, Store


@dataclass(frozen=True)
class Claim:
    """A request as a try brings it; as its first try brought it in what `Claims.make` returns."""

    request_id: str
    seed: int
    model: str
    version: str


@dataclass(frozen=True)
class Claimed:
    """`tries`: from 1. `created_at`: seconds since 1970."""

    first: Claim
    tries: int
    created_at: float

    @property
    def lost_epoch(self) -> int:
        """The epoch that every lease of this try is above, and every lease of an older one below."""
        return self.tries * keys.EPOCHS_PER_TRY


class Claims:
    """One scheduler's hand on them."""

    def __init__(self, store: Store, *, keep_seconds: float = 3600.0, most: int = 10_000) -> None:
        """`keep_seconds`: after the request's end. `most`: of one org; its oldest are forgotten for new ones."""
        self._store = store
        self._keep_ms = round(keep_seconds * 1000)
        self._most = most

    async def make(self, org: str, key_hash: str, digest: str, claim: Claim, deadline_seconds: float) -> Claimed:
        """One more try. INVALID_ARGUMENT: the key stands for a request with another digest."""
        args: list[str | int | float] = [org, key_hash, digest, claim.request_id, claim.seed, claim.model, claim.version]
        args += [round(deadline_seconds * 1000), self._keep_ms, self._most]
        outcome, *found = await self._store.run(Call("claim", [keys.once(org, key_hash), keys.onces(org)], args))
        if outcome == "reused":
            words = "this idempotency key came with another request before: send the same request, or use a new key"
            raise StatusError(Code.INVALID_ARGUMENT, words, reason="IDEMPOTENCY_KEY_REUSED")
        tries, request_id, seed, model, version, created_ms = found
        return Claimed(Claim(request_id, int(seed), model, version), int(tries), created_ms / 1000)
