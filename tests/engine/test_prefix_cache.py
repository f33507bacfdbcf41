"""Names of block contents: what must differ differs, and nothing runs together."""

from __future__ import annotations

import itertools

from pagemill.engine.prefix_cache import block_hashes, root_hash
from tests.engine.invented import Bench, make


def test_tags_do_not_run_together() -> None:
    tags = [
        {"model": "a", "salt": "b"},
        {"model": "ab", "salt": ""},
        {"model": "", "salt": "ab"},
        {"model": "b", "salt": "a"},
        {"model": "a"},
        {"model": "asaltb"},
        {"salt": "a"},
        {"model": "a\x00salt\x00b"},
        {},
    ]
    for one, other in itertools.combinations(tags, 2):
        assert root_hash(one) != root_hash(other)


def test_a_name_depends_on_every_token_and_all_before() -> None:
    root = root_hash({})
    names = {block_hashes(root, tokens, len(tokens))[0] for tokens in ([1, 2], [2, 1], [1, 2, 0], [12], [1], [513])}
    assert len(names) == 6
    chain = block_hashes(root, [1, 2], 1)
    assert chain == [*block_hashes(root, [1], 1), *block_hashes(chain[0], [2], 1)]
    assert chain[-1] not in block_hashes(root, [1, 2], 2)


def hits(second_salt: str, first_len: int = 32, second: list[int] | None = None) -> int:
    bench = Bench(num_blocks=20, block_size=16)
    prompt = list(range(1, first_len + 1))
    bench.add(make("first", prompt, 2, salt="one"))
    bench.run()
    bench.add(make("second", second or prompt, 2, salt=second_salt))
    bench.run()
    metrics = bench.ends["second"].metrics
    assert metrics is not None
    return metrics.cached_tokens


def test_prefixes_are_shared_within_one_salt_only() -> None:
    assert hits("one", 40) == 32
    assert hits("other", 40) == 0


def test_a_hit_leaves_a_token_to_compute() -> None:
    """A prompt of exactly two blocks, sent twice: the second block is computed again for its last token's logits."""
    assert hits("one", 32) == 16
    assert hits("one", 33) == 32
    assert hits("one", 16) == 0


def test_the_answer_is_a_prefix_too() -> None:
    """A second turn finds the blocks that the first turn generated."""
    bench = Bench(num_blocks=20, block_size=4)
    bench.add(make("turn1", [1, 2, 3, 4, 5], 11, ignore_eos=True))
    bench.run()
    bench.add(make("turn2", [1, 2, 3, 4, 5, *bench.tokens["turn1"], 9, 9], 2))
    bench.run()
    metrics = bench.ends["turn2"].metrics
    assert metrics is not None
    assert metrics.cached_tokens == 12, "5 + 11 tokens, the last of them never computed: three full blocks"


def test_forgetting_the_cache_forgets_all_of_it() -> None:
    bench = Bench(num_blocks=20, block_size=4)
    bench.add(make("a", range(1, 20), 2))
    bench.run()
    assert bench.cache.forget_cached() > 0
    bench.add(make("b", range(1, 20), 2))
    bench.run()
    assert bench.cache.statistics().hit_tokens == 0
