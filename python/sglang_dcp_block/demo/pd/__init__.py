"""``python -m sglang_dcp_block.demo.pd``: prefill servers send KV to decode servers, dealt by tokens and in blocks.

plan       which servers, which prompts
client     one request to a prefill and a decode server at once
mooncake   whether it loads
counters   what a prefill server sent, from its Prometheus endpoint
report     differences, transfers, the tables, the verdict
run        carries out the plan
"""
