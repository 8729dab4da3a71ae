"""Index math of blocks, beside upstream's own: nothing calls it with more than one token yet."""

import libcst.matchers as m

from upstream.edit import add_parameter, after, before, defines, docstring, exchange, on, reads, returns

MESSAGE = """
[DCP] Extend the layout's index math to runs of interleave_size tokens

get_dcp_lens and localize_dcp_indices already deal runs of
interleave_size positions, which the NPU path uses with its page size.
Add what other backends need for the same layout: the position of a
rank's i-th token, the row of a slot on its owner, and this rank's rows
of a run of slots, also of one that ends inside a run of tokens. Writers
with a padding sink can ask localize_dcp_indices for its row in place of
-1.

With the default of one token every result is what it was.
"""

EDITS = (
    on(
        "sglang.srt.layers.dcp.layout",
        "",
        after(
            defines("get_dcp_lens"),
            '''
            def get_dcp_positions(
                local_indices: torch.Tensor,
                dcp_size: int,
                dcp_rank: int,
                interleave_size: int = 1,
            ) -> torch.Tensor:
                """Return the positions of one rank's tokens, counted among its own.

                Inverse of the owner rule: token i of a rank lies in its run
                ``i // interleave_size``, and ``dcp_size`` runs make a cycle.
                """
                run = local_indices // interleave_size
                return (
                    run * (dcp_size * interleave_size)
                    + dcp_rank * interleave_size
                    + local_indices % interleave_size
                )


            def collapse_dcp_indices(
                indices: torch.Tensor, dcp_size: int, interleave_size: int = 1
            ) -> torch.Tensor:
                """Map global DCP indices to their rows on the ranks that own them."""
                if interleave_size == 1:
                    return indices // dcp_size
                cycle = indices // (dcp_size * interleave_size)
                return cycle * interleave_size + indices % interleave_size
            ''',
        ),
    ),
    on(
        "sglang.srt.layers.dcp.layout",
        "localize_dcp_indices",
        add_parameter("non_local: int = -1"),
        docstring("Map global DCP indices to one rank's rows; others' become ``non_local``."),
        exchange(
            "the fill value of other ranks' indices",
            m.Call(func=m.Attribute(attr=m.Name("full_like"))),
            "torch.full_like(indices, non_local)",
        ),
    ),
    on(
        "sglang.srt.layers.dcp.layout",
        "maybe_dcp_kernel_indices",
        add_parameter("interleave_size: int = 1"),
        docstring(
            """
            Widened logical slots -> this rank's physical rows.

            The run of slots starts at a page and follows the positions of a request, so
            this rank's slots are at its positions in the run; no mask is needed, also
            where the run ends anywhere in a page.
            """
        ),
        before(
            returns() & reads("dcp_rank"),
            """
            if interleave_size > 1:
                num_local = get_dcp_lens(
                    torch.tensor(len(indices)),
                    dcp_size,
                    dcp_rank,
                    interleave_size=interleave_size,
                )
                local = torch.arange(int(num_local), device=indices.device)
                positions = get_dcp_positions(local, dcp_size, dcp_rank, interleave_size)
                return collapse_dcp_indices(indices[positions], dcp_size, interleave_size)
            """,
        ),
    ),
)
