"""Names of a prompt's beginnings, by which schedulers find the worker that has computed them before. They can make none."""

import hashlib
from array import array
from collections.abc import Sequence

HASH_TOKENS = 64
"""Tokens that one hash more stands for: what is shorter is worth no other worker, and each hash is in Redis while its ticket waits."""
MAX_HASHES = 256
"""What lies beyond so many isn't named: 16,384 tokens tell prompts apart well enough."""
HASH_BYTES = 8


def block_hashes(salt: bytes, version: str, token_ids: Sequence[int]) -> list[bytes]:
    """Chained hashes of the first 64, 128, ... tokens, keyed by the org's salt: equal for one org, equal weights and equal tokens alone.

    The last token is never cached, as computing it gives the first answer; so a hash needs a token behind its block.
    """
    num_hashes = min(MAX_HASHES, (len(token_ids) - 1) // HASH_TOKENS)
    if num_hashes <= 0:
        return []
    stride = HASH_TOKENS * 4
    data = memoryview(array("i", token_ids[: num_hashes * HASH_TOKENS])).cast("B")
    chain = hashlib.blake2b(version.encode(), digest_size=HASH_BYTES, key=salt)
    hashes = []
    for start in range(0, len(data), stride):
        chain.update(data[start : start + stride])
        hashes.append(chain.digest())
    return hashes
