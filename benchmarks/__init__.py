"""``python -m benchmarks``: what blocks gain and where they lose, measured on a machine without a GPU.

record       a row, a check and a result; plain data
timing       variants in turns, and percentiles
machine      what it ran on, and the versions
writing      Markdown, CSV and PNG
headline     the README's table, from the CSVs
suite        which benchmarks there are
environment  lets this process import SGLang on a CPU
sender       a prefill server's sender, and a decode rank's memory in another process behind real Mooncake

The other files are a benchmark each, with a function ``measure`` that returns a result.
"""
