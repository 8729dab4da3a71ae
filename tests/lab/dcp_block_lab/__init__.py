"""A test-only SGLang plugin: steers and inspects the schedulers of an engine under test.

The test writes an order (JSON) into ``$DCP_BLOCK_LAB/order.json`` and flushes the cache, which SGLang carries out in every
scheduler at a moment with no batch in flight.  Each scheduler then writes what its allocator, radix tree and
pool hold into ``state.<rank>.pt`` and takes on the order's block size and mutant, so one engine serves many cases.
"""
