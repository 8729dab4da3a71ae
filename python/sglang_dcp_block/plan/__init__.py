"""``sglang-dcp-block plan``: which block and page size for a model, its requests and a link; plain arithmetic, no server.

mix        lengths of requests: a histogram, a trace, a preset
inputs     what a plan is made for, and what of it cannot work
figures    KV of each GPU, balance of ranks, rounding of pages, segments and seconds of transfers
advice     the block and page that follow from the figures, with reasons
whole      all of it together: one plan
show, to_json, draw, page   the plan as tables, as JSON, as a picture, as one HTML file
command    the command line
"""
