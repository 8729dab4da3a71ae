"""Modules that must be importable before SGLang is: this folder itself goes on ``PYTHONPATH``, in front.

It is inherited by the processes that SGLang spawns.  Nothing imports these modules as part of the package.
"""
