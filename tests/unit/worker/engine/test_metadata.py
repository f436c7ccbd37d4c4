"""The metadata of a step, from plain ints."""

from services.worker.engine.attention import AttentionMetadata


def test_slots_and_tables() -> None:
    metadata = AttentionMetadata.build([3, 1], [6, 9], [[7, 2, 99], [5, 4, 3]], block_size=4)
    assert metadata.slot_blocks.tolist() == [7, 2, 2, 3]
    assert metadata.slot_offsets.tolist() == [3, 0, 1, 0]
    assert metadata.block_tables.tolist() == [[7, 2, 7], [5, 4, 3]]  # only what the context reaches, filled with the first
    assert (metadata.query_lengths, metadata.context_lengths) == ((3, 1), (6, 9))
