"""KV between nodes whose pools differ in block size, tensor-parallel degree or dtype: plans, and copies of arrays.

For one handoff: `check` once per peer, `routes` between the ranks, `windows` of each route, and per window
`pieces_of_pool` or `pack` at the source, a transfer into the destination's staging area, and `unpack` there.

Staging holds source blocks in the source's block size and dtype, narrowed to the heads of the route:
[staged blocks, layers, 2, heads of the route, source block_size, head_dim].
"""
