"""One check for one GPU: this project's kernels, compiled, with all ranks of a DCP group simulated on the device.

``make gpu-check``, or ``python -m sglang_dcp_block.gpu_check``; needs torch, Triton and NumPy, and neither SGLang nor a
network.  Takes a few minutes.  Without a GPU the same checks run small in Triton's interpreter, and the report says so.

    attention    a plain decode kernel and the merge over ranks
    simulation   requests, the pools of all ranks, and one decode step over them
    checks       what must hold: maps and index arrays against the layout, attention against dense float32, CUDA graphs
    timing       times with blocks of one token and of 64, side by side
    report       tables, with rich where it is installed
"""
