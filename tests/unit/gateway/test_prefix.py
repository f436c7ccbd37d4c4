"""A prompt's beginnings have names that tell orgs, weights and tokens apart, and are bounded."""

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.prefix import HASH_BYTES, HASH_TOKENS, MAX_HASHES, block_hashes

SALT, OTHER = b"s" * 32, b"t" * 32


@given(st.integers(0, 400), st.integers(0, 400), st.integers(0, 400))
def test_prompts_share_as_many_names_as_whole_blocks(shared: int, first: int, second: int) -> None:
    one = block_hashes(SALT, "v1", [*range(shared), *[1_000_000] * (first + 1)])
    other = block_hashes(SALT, "v1", [*range(shared), *[2_000_000] * (second + 1)])
    same = [a == b for a, b in zip(one, other, strict=False)]
    assert same == [index < shared // HASH_TOKENS for index in range(len(same))]


def test_org_and_weights_are_part_of_a_name() -> None:
    tokens = list(range(200))
    names = [block_hashes(SALT, "v1", tokens), block_hashes(OTHER, "v1", tokens), block_hashes(SALT, "v2", tokens)]
    assert len({name for chain in names for name in chain}) == 9


def test_names_are_short_bounded_and_leave_the_last_token_to_be_computed() -> None:
    assert block_hashes(SALT, "v1", []) == block_hashes(SALT, "v1", [7] * HASH_TOKENS) == []
    assert len(block_hashes(SALT, "v1", [7] * (HASH_TOKENS + 1))) == 1
    many = block_hashes(SALT, "v1", [7] * 100_000)
    assert (len(many), {len(name) for name in many}) == (MAX_HASHES, {HASH_BYTES})
