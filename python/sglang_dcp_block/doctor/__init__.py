"""``sglang-dcp-block doctor``: what would keep a server with blocks from starting, and what a running one really uses.

findings      what a check says; the exit status
this machine  versions, plugin, patch_points, libraries, ports; flags and resolve: a server's command line
servers       http, server, pair, metrics: running ones, asked by HTTP
command       the command line; report: how findings are shown

Checks are plain functions that return findings.  None of them raises, and none needs SGLang or torch to be there.
"""
