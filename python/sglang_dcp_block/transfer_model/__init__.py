"""What a prefill -> decode transfer costs: exact counts of segments and bytes, and a model of the time they take.

shapes     KV of a model: layers, heads, bytes of a row; from presets or a config.json
counts     segments and rows that each decode rank gets, as the sender plans them
links      seconds a segment, bytes a second, gather and sync; each figure with its source
times      the model itself, and the block from which sending as it lies beats packing
tables     the tables of docs/transfer-model.md, made from all of these
"""
