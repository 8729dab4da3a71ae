"""MLA under decode context parallelism in the Triton backend; a series of its own, on top of the blocks."""
