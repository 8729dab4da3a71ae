"""``python -m sglang_dcp_block.demo``: the same prompts through plain SGLang, token round-robin and blocks, compared.

plan       which models, configurations and prompts
servers    one ``sglang serve`` process: start, wait, end
client     completions over HTTP
report     differences, occupancy, the table, the verdict
run        carries out the plan
cli        options that this demo and the one in ``pd/`` share
pd/        prefill and decode servers: ``python -m sglang_dcp_block.demo.pd``
progress   what is going on, on a terminal or in a log
"""
