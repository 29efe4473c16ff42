"""The hash chain: a name says everything that the KV of a block depends on, and nothing else."""

from itertools import combinations

from scheduler.prefix import extend_chain, hash_block, hash_partial, is_partial, root

ROOT = root(None, None)


def chain_of(tokens: list[int], block_size: int = 4, first_parent: bytes = ROOT) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, tokens, block_size, first_parent)
    return chain


def test_only_full_blocks_have_a_place_in_the_chain() -> None:
    assert [len(chain_of(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_equal_prefixes_have_equal_chains() -> None:
    long = chain_of(list(range(20)))
    assert chain_of(list(range(12))) == long[:3]


def test_a_block_is_named_by_everything_before_it() -> None:
    left, right = chain_of([1, 2, 3, 4, 9, 9, 9, 9]), chain_of([1, 2, 3, 5, 9, 9, 9, 9])
    assert left[0] != right[0]
    assert left[1] != right[1]


def test_a_chain_is_the_hashes_of_its_blocks_one_behind_the_other() -> None:
    first = hash_block(ROOT, [1, 2, 3, 4])
    assert chain_of([1, 2, 3, 4, 5, 6, 7, 8, 9]) == [first, hash_block(first, [5, 6, 7, 8])]


def test_token_boundaries_count() -> None:
    assert hash_block(ROOT, [1, 256]) != hash_block(ROOT, [257, 0])
    assert hash_block(ROOT, [0]) != hash_block(ROOT, [0, 0])


def test_a_chain_grows_as_tokens_do() -> None:
    tokens = list(range(6))
    chain = chain_of(tokens)
    for token in range(6, 30):
        tokens.append(token)
        extend_chain(chain, tokens, 4)
    assert chain == chain_of(tokens)


def test_names_are_short_and_the_largest_token_id_fits() -> None:
    assert len(hash_block(ROOT, [2**32 - 1])) == 16


def test_a_partial_block_never_has_the_name_of_a_full_one() -> None:
    full, partial = hash_block(ROOT, [1, 2]), hash_partial(ROOT, [1, 2])
    assert full != partial
    assert (is_partial(full), is_partial(partial), is_partial(ROOT)) == (False, True, False)


def test_a_partial_block_is_named_by_its_tokens_and_what_is_before_it() -> None:
    names = {
        hash_partial(parent, tokens) for parent in (ROOT, hash_block(ROOT, [7])) for tokens in ([1], [1, 2], [1, 3])
    }
    assert len(names) == 6
    assert hash_partial(ROOT, [1, 2]) in names


def test_adapters_and_salts_have_roots_of_their_own() -> None:
    asked = [
        *((None, None), ("", None), (None, ""), ("", "")),
        *(("a", None), (None, "a"), ("a", "a"), ("a", "b"), ("b", "a")),
        *(("ab", None), ("a=b", None), ("=", ""), ("", "=")),
    ]
    for left, right in combinations(asked, 2):
        assert root(*left) != root(*right), (left, right)
    assert root("a", "b") == root("a", "b")


def test_a_root_separates_whole_chains() -> None:
    tokens = list(range(12))
    chains = [chain_of(tokens, first_parent=root(*key)) for key in ((None, None), ("a", None), (None, "a"))]
    assert len({name for chain in chains for name in chain}) == 9
