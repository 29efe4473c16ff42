from scheduler.prefix import ROOT, extend_chain, hash_block


def chain_of(tokens: list[int], block_size: int = 4) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, tokens, block_size)
    return chain


def test_only_full_blocks_have_a_name() -> None:
    assert [len(chain_of(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_equal_prefixes_have_equal_chains() -> None:
    long = chain_of(list(range(20)))
    assert chain_of(list(range(12))) == long[:3]


def test_a_block_is_named_by_everything_before_it() -> None:
    left, right = chain_of([1, 2, 3, 4, 9, 9, 9, 9]), chain_of([1, 2, 3, 5, 9, 9, 9, 9])
    assert left[0] != right[0]
    assert left[1] != right[1]


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
