"""Whole decoder steps for model structures that are recognised exactly: one native call on the CPU, ten kernels per layer on CUDA."""
